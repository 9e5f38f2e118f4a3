package jetlog

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/archive"
)

// clockSkew is the largest difference between the clocks of a client and the server at
// which a resent event is still recognised.
const clockSkew = 10 * time.Second

// fetch asks once for a message of the log, wherever it is.
func (l *Log) fetch(ctx context.Context, q msgGet) (stored, error) {
	end := l.sealed().Last
	switch {
	case end == 0:
	case q.NextFor != "" && q.Seq <= end:
		a, err := l.archived(ctx)
		if err != nil {
			return stored{}, err
		}
		next, err := a.Next(q.NextFor, q.Seq)
		if err != nil {
			return stored{}, damagedArchive(err)
		}
		if next > 0 {
			return l.fetchSealed(ctx, next)
		}
		q.Seq = end + 1
	case q.Seq > 0 && q.Seq <= end:
		return l.fetchSealed(ctx, q.Seq)
	}
	m, err := l.getStored(ctx, tailName(end), q)
	if hasCode(err, codeNoStream) {
		return stored{}, l.suspect(err)
	}
	if !errors.Is(err, errNoMessage) || q.LastFor == "" || end == 0 {
		return m, err
	}
	a, aerr := l.archived(ctx)
	if aerr != nil {
		return stored{}, aerr
	}
	last, aerr := a.Latest(q.LastFor)
	if aerr != nil {
		return stored{}, damagedArchive(aerr)
	}
	if last == 0 {
		return m, err
	}
	return l.fetchSealed(ctx, last)
}

// suspect marks the known state of the server as stale, and err as settled by a retry:
// the live stream may have been sealed, and another stream continues it.
func (l *Log) suspect(err error) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.checked = 0
	return fmt.Errorf("%w: %w", errAgain, err)
}

// fetchSealed reads a message of the archive.
func (l *Log) fetchSealed(ctx context.Context, sequence uint64) (stored, error) {
	a, err := l.archived(ctx)
	if err != nil {
		return stored{}, err
	}
	m, err := a.At(sequence)
	if err != nil {
		return stored{}, damagedArchive(err)
	}
	return stored{Subject: m.Subject, Seq: m.Sequence, Headers: m.Header, Data: m.Data, Time: m.Time}, nil
}

// sealed yields the archive's events from the next event on.
func (r *reader) sealed(ctx context.Context) error {
	a, err := r.l.archived(ctx)
	if err != nil {
		return err
	}
	until := a.End().Last
	if r.until != 0 {
		until = min(until, r.until)
	}
	for m, err := range a.Read(ctx, r.next, until) {
		if err != nil {
			return damagedArchive(err)
		}
		r.next++
		r.header = stored{Headers: m.Header}.readable()
		r.raw = events.Message{Subject: m.Subject, Header: r.header, Data: m.Data}
		if !r.yield(r.decoded(m.Sequence, m.Time), nil) {
			return errStop
		}
	}
	return nil
}

// sealedMeanwhile finds the events of jobs that are in the archive because they were
// sent to an earlier tail and their acknowledgement was lost. It looks back as far as a
// server remembers IDs, because the server of this tail does not know theirs. It looks
// only for events that were minted before this tail was created, and notes their
// sequences in had.
func (l *Log) sealedMeanwhile(ctx context.Context, jobs []*job) error {
	l.mu.Lock()
	end, made := l.tail.sealed.Last, l.tail.created
	l.mu.Unlock()
	since := made
	ids := map[string]*job{}
	for _, j := range jobs {
		for _, e := range j.events {
			if j.looked < end && e.Time.Before(made.Add(clockSkew)) {
				ids[e.ID] = j
				if at := e.Time.Add(-clockSkew); at.Before(since) {
					since = at
				}
			}
		}
	}
	if len(ids) > 0 {
		a, err := l.archived(ctx)
		if err != nil {
			return err
		}
		if oldest := made.Add(-duplicates - clockSkew); since.Before(oldest) {
			since = oldest
		}
		from, err := a.Since(since)
		if err != nil {
			return damagedArchive(err)
		}
		for m, err := range a.Read(ctx, from, end) {
			if err != nil {
				return damagedArchive(err)
			}
			id := messageID(m)
			if j := ids[id]; j != nil {
				if j.had == nil {
					j.had = map[string]uint64{}
				}
				j.had[id] = m.Sequence
			}
		}
	}
	for _, j := range jobs {
		j.looked = end
	}
	return nil
}

// messageID returns the ID by which the server detects duplicates of a message.
func messageID(m archive.Message) string {
	_, rest, found := bytes.Cut(m.Header, []byte("\r\n"+events.HeaderMsgID+":"))
	if !found {
		return ""
	}
	id, _, _ := bytes.Cut(rest, []byte("\r\n"))
	return string(bytes.TrimSpace(id))
}
