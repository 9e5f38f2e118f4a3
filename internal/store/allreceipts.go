package store

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
)

// maxReceiptFindings is how many receipts are named that the log contradicts.
const maxReceiptFindings = 100

// allReceipts holds every receipt of a store to be about an event of its log,
// while that is read from its start: of each it keeps 16 bytes.
type allReceipts struct {
	said  []saidCommit // in order of their sequences
	at    int          // the first one that the log has not come to
	wrong []uint64     // sequences at which the log has something else
}

// saidCommit is what a receipt says.
type saidCommit struct {
	sequence uint64
	event    [8]byte // of the digest of its ID
}

// listReceipts reads the receipts. What is in the log when it is asked for its
// end after that has the events of all of them.
func listReceipts(ctx context.Context, s *Store, pace func(context.Context, int64) error) (*allReceipts, error) {
	const each = 512 // bytes of a receipt, about
	a := &allReceipts{}
	err := s.Data.EachReceipt(ctx, func(r checkpoint.Receipt) error {
		if r.Store == s.ID {
			a.said = append(a.said, saidCommit{r.Sequence, eventMark(r.Event)})
		}
		return pace(ctx, each)
	})
	slices.SortFunc(a.said, func(x, y saidCommit) int {
		return cmp.Or(cmp.Compare(x.sequence, y.sequence), bytes.Compare(x.event[:], y.event[:]))
	})
	a.said = slices.Compact(a.said) // copies of a checkpoint
	return a, err
}

func eventMark(id string) [8]byte {
	sum := sha256.Sum256([]byte(id))
	return [8]byte(sum[:8])
}

// see compares the next event of the log. One that cannot be read is a finding
// already.
func (a *allReceipts) see(e events.Recorded) {
	for ; a.at < len(a.said) && a.said[a.at].sequence <= e.Sequence; a.at++ {
		if said := a.said[a.at]; said.sequence == e.Sequence && said.event != eventMark(e.ID) {
			a.wrong = append(a.wrong, e.Sequence)
		}
	}
}

// findings names the receipts that the log, which ends at last, contradicts.
func (a *allReceipts) findings(ctx context.Context, s *Store, last uint64) (found []LogFinding, err error) {
	beyond := slices.ContainsFunc(a.said[a.at:], func(c saidCommit) bool { return c.sequence > last })
	if len(a.wrong) == 0 && !beyond {
		return nil, nil
	}
	errEnough := errors.New("enough")
	err = s.Data.EachReceipt(ctx, func(r checkpoint.Receipt) error {
		_, wrong := slices.BinarySearch(a.wrong, r.Sequence)
		if r.Store != s.ID || !wrong && r.Sequence <= last {
			return nil
		}
		has := fmt.Sprintf("the log ends at event %d", last)
		if r.Sequence <= last {
			e, err := s.Log.At(ctx, r.Sequence)
			if err == nil && e.ID == r.Event {
				return nil // the other receipt with that sequence is wrong
			}
			if has = fmt.Sprintf("in the log that is %s, %s", e.ID, e.Kind); err != nil {
				has = err.Error()
			}
		}
		found = append(found, LogFinding{Sequence: r.Sequence, Problem: fmt.Sprintf("by %s it is %s, which commits %s@%s; %s: the log was rolled back",
			filepath.Join(s.DataDir, r.Ref.String(), checkpoint.ReceiptFile), r.Event, r.Run, r.Checkpoint, has)})
		if len(found) == maxReceiptFindings {
			return errEnough
		}
		return nil
	})
	if errors.Is(err, errEnough) {
		err = nil
	}
	return found, err
}
