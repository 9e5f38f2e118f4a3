package jetlog

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/archive"
)

// fetch asks once for a message of the log, wherever it is.
func (l *Log) fetch(ctx context.Context, q msgGet) (stored, error) {
	end := l.sealed().Last
	switch {
	case end == 0:
	case q.NextFor != "" && q.Seq <= end:
		a, err := l.archived()
		if err != nil {
			return stored{}, err
		}
		next, err := a.Next(q.NextFor, q.Seq)
		if err != nil {
			return stored{}, damagedArchive(err)
		}
		if next > 0 {
			return l.fetchSealed(next)
		}
		q.Seq = end + 1
	case q.Seq > 0 && q.Seq <= end:
		return l.fetchSealed(q.Seq)
	}
	m, err := l.getStored(ctx, TailName(end), q)
	if hasCode(err, codeNoStream) {
		return stored{}, l.suspect(err)
	}
	if !errors.Is(err, errNoMessage) || q.LastFor == "" || end == 0 {
		return m, err
	}
	a, aerr := l.archived()
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
	return l.fetchSealed(last)
}

// suspect marks what is known of the server as old, and err as settled by trying
// again: the live stream may have been sealed, and another continues it.
func (l *Log) suspect(err error) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.checked = 0
	return fmt.Errorf("%w: %w", errAgain, err)
}

// fetchSealed reads a message of the archive.
func (l *Log) fetchSealed(sequence uint64) (stored, error) {
	a, err := l.archived()
	if err != nil {
		return stored{}, err
	}
	m, err := a.At(sequence)
	if err != nil {
		return stored{}, damagedArchive(err)
	}
	return stored{Subject: m.Subject, Seq: m.Sequence, Headers: m.Header, Data: m.Data, Time: m.Time}, nil
}

// sealed yields what the archive has from the next event on.
func (r *reader) sealed(ctx context.Context) error {
	a, err := r.l.archived()
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
		header, err := stored{Headers: m.Header}.header()
		if err != nil {
			return fmt.Errorf("event %d of the log: headers: %w", m.Sequence, err)
		}
		event, err := recorded(m.Subject, header, m.Data, m.Sequence, m.Time)
		if err != nil {
			return err
		}
		r.next++
		r.header = header
		if !r.yield(event, nil) {
			return errStop
		}
	}
	return nil
}

// sealedMeanwhile finds the events of jobs that were sent to an earlier tail, were
// not acknowledged, and are in the archive now: the server of this tail does not
// know their IDs. It returns their sequences.
func (l *Log) sealedMeanwhile(ctx context.Context, jobs []*job) (map[string]uint64, error) {
	end := l.sealed().Last
	from := end
	ids := map[string]bool{}
	for _, j := range jobs {
		if j.tried && j.sealed < end {
			from = min(from, j.sealed)
			for _, e := range j.events {
				ids[e.ID] = true
			}
		}
	}
	found := map[string]uint64{}
	if len(ids) > 0 {
		a, err := l.archived()
		if err != nil {
			return nil, err
		}
		for m, err := range a.Read(ctx, from+1, end) {
			if err != nil {
				return nil, damagedArchive(err)
			}
			if id := messageID(m); ids[id] {
				found[id] = m.Sequence
			}
		}
	}
	for _, j := range jobs {
		j.tried, j.sealed = true, end
	}
	return found, nil
}

// messageID is the ID by which the server knows duplicates of a message.
func messageID(m archive.Message) string {
	_, rest, found := bytes.Cut(m.Header, []byte("\r\n"+events.HeaderMsgID+":"))
	if !found {
		return ""
	}
	id, _, _ := bytes.Cut(rest, []byte("\r\n"))
	return string(bytes.TrimSpace(id))
}
