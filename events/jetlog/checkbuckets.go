package jetlog

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
)

// buckets checks that the keys next to the log are readable, well-formed and as many as
// the server counts. It also checks that cursors are within the log and that every
// witness has its cursor.
func (c *checker) buckets(ctx context.Context) error {
	ctx, cancel := deadline(ctx, DefaultAppend)
	defer cancel()
	var found []string
	err := c.l.retry(ctx, func(ctx context.Context) (err error) {
		if err = c.l.known(ctx); err == nil {
			found, err = c.l.checkBuckets(ctx)
		}
		return err
	})
	for _, problem := range found {
		c.out.Findings = append(c.out.Findings, Finding{Problem: problem, Aside: true})
	}
	return err
}

func (l *Log) checkBuckets(ctx context.Context) (found []string, err error) {
	cursors := map[string]uint64{}
	for _, b := range []struct {
		name  string
		value func(key string, data []byte) error
	}{
		{Cursors, func(key string, data []byte) error {
			var v cursorValue
			err := json.Unmarshal(data, &v)
			cursors[key] = v.Sequence
			return named(err, key, v.Name)
		}},
		{Witnesses, func(key string, data []byte) error {
			var v witnessValue
			return named(json.Unmarshal(data, &v), key, v.Name)
		}},
		{Leases, func(_ string, data []byte) error {
			var v leaseValue
			err := json.Unmarshal(data, &v)
			if err == nil && (v.Token == "" || v.TermMS <= 0) {
				err = errors.New("no token or no term")
			}
			return err
		}},
	} {
		some, err := l.checkBucket(ctx, b.name, b.value)
		if err != nil {
			return nil, err
		}
		found = append(found, some...)
	}
	info, err := l.ours(ctx) // current: a cursor may have moved meanwhile
	if err != nil {
		return nil, err
	}
	for key, at := range cursors {
		if at > info.State.LastSeq {
			found = append(found, fmt.Sprintf("cursor %q stands at event %d, and the log ends at %d", key, at, info.State.LastSeq))
		}
	}
	witnesses, _, err := l.keys(ctx, Witnesses)
	if err != nil {
		return nil, err
	}
	for _, key := range witnesses {
		state, err := l.cursorState(ctx, key)
		if err != nil {
			return nil, err
		}
		if _, read := cursors[key]; state.Damage != nil && !read {
			found = append(found, fmt.Sprintf("cursor %q: %v", key, state.Damage))
		}
	}
	slices.Sort(found)
	return found, nil
}

// named checks that a value names its own key.
func named(err error, key, name string) error {
	if err == nil && bucketKey(name) != key {
		err = fmt.Errorf("the value belongs to %q", name)
	}
	return err
}

// checkBucket reads all keys of one bucket.
func (l *Log) checkBucket(ctx context.Context, bucket string, value func(key string, data []byte) error) (found []string, err error) {
	keys, state, err := l.keys(ctx, bucket)
	if err != nil {
		return nil, err
	}
	bad := func(format string, a ...any) { found = append(found, "bucket "+bucket+": "+fmt.Sprintf(format, a...)) }
	if state.Lost != nil {
		bad("the server lost %d values (%d bytes) to a damaged block", len(state.Lost.Msgs), state.Lost.Bytes)
	}
	if state.LastSeq > 0 && len(keys) == 0 {
		bad("it had %d values, and no key is left", state.LastSeq)
	}
	for _, key := range keys {
		m, err := l.entry(ctx, bucket, key)
		switch {
		case errors.Is(err, errUnreadable):
			bad("the value of key %q cannot be read", key)
		case err != nil:
			return nil, err
		case m.Seq != 0:
			if err := value(key, m.Data); err != nil {
				bad("the value of key %q: %v", key, err)
			}
		}
	}
	return found, nil
}
