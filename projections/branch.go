package projections

import (
	"errors"
	"slices"
)

// branch is a stretch of one attempt: the reports with from < iteration <= to. They
// follow base iterations of the attempts that it continues.
type branch struct {
	attempt, from, to, base int
	hidden                  bool
}

// lineBranches returns the windows of the line, the newest first.
func lineBranches(r Reader, t Trial) ([]branch, error) {
	line, err := windows(r, t)
	if err != nil {
		return nil, err
	}
	branches := make([]branch, len(line))
	base := 0
	for i, w := range slices.Backward(line) {
		branches[i] = branch{attempt: w.attempt, from: w.from, to: w.to, base: base}
		base += w.to - w.from
	}
	return branches, nil
}

// hiddenBranches returns the parts of all attempts' segments that are not in the line.
func hiddenBranches(r Reader, t Trial, line []branch) ([]branch, error) {
	var branches []branch
	bases := map[uint64]int{}
	for attempt := 0; ; attempt++ {
		next, found, err := reportedAttempt(r, t, attempt)
		if err != nil || !found {
			return branches, err
		}
		attempt = next
		newest, _, err := newestReport(r, t.Run, t.Name, attempt)
		if err != nil {
			return nil, err
		}
		a, started, err := load[Attempt](r, attemptKey(t.Run, t.Name, attempt))
		if err != nil {
			return nil, err
		}
		if !started { // no decision began it, but it was reported
			a.Segments = []Segment{{}}
		}
		for i, s := range a.Segments {
			b := branch{attempt: attempt, from: s.From, to: max(newest.Iteration, s.From), hidden: true}
			if i+1 < len(a.Segments) {
				b.to = a.Segments[i+1].From
			}
			if b.base, err = baseOf(r, t, s, bases); err != nil {
				return nil, err
			}
			branches = append(branches, b.without(line)...)
		}
	}
}

// without returns the stretches of a branch that are in none of the others.
func (b branch) without(others []branch) []branch {
	rest := []branch{b}
	for _, o := range others {
		var kept []branch
		for _, b := range rest {
			if o.attempt != b.attempt || o.to <= b.from || o.from >= b.to {
				kept = append(kept, b)
				continue
			}
			if b.from < o.from {
				kept = append(kept, b.between(b.from, o.from))
			}
			if o.to < b.to {
				kept = append(kept, b.between(o.to, b.to))
			}
		}
		rest = kept
	}
	return rest
}

func (b branch) between(from, to int) branch {
	b.base += from - b.from
	b.from, b.to = from, to
	return b
}

// reportedAttempt returns the first attempt at or after from that has a report.
func reportedAttempt(r Reader, t Trial, from int) (attempt int, found bool, err error) {
	prefix := key(keyReport, t.Run, t.Name)
	err = r.Scan(number(prefix, uint64(from)), after(prefix), func(k, value []byte) error {
		report, err := decodeReport(k, value)
		if err != nil {
			return err
		}
		attempt, found = report.Attempt, true
		return errFound
	})
	if errors.Is(err, errFound) {
		err = nil
	}
	return attempt, found, err
}

// baseOf returns how many iterations a segment continues. known caches the results for
// other segments, by the sequence that opened them.
func baseOf(r Reader, t Trial, s Segment, known map[uint64]int) (int, error) {
	if base, ok := known[s.Seq]; ok || s.ResumeSeq == 0 {
		return base, nil
	}
	c, found, err := load[Checkpoint](r, checkpointKey(t.Run, t.Name, s.ResumeSeq))
	if err != nil || !found {
		return 0, err
	}
	a, found, err := load[Attempt](r, attemptKey(t.Run, t.Name, c.Attempt))
	if err != nil || !found {
		return 0, err
	}
	before := a.segment(c.BegunSeq)
	at, _, err := reportAt(r, c, before.From)
	if err != nil {
		return 0, err
	}
	base, err := baseOf(r, t, before, known)
	if err != nil {
		return 0, err
	}
	base += at.Iteration - before.From
	known[s.Seq] = base
	return base, nil
}
