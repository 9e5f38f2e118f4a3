package projections

import (
	"errors"
	"math"
)

// errFound ends a scan early.
var errFound = errors.New("found")

// checkpointByID returns the row of a full ID.
func checkpointByID(r Reader, run, trial, id string) (Checkpoint, bool, error) {
	begun, found, err := load[uint64](r, idKey(run, trial, id))
	if err != nil || !found {
		return Checkpoint{}, false, err
	}
	return load[Checkpoint](r, checkpointKey(run, trial, begun))
}

// ownCommitted returns the begun sequence of the trial's own committed checkpoint of
// that ID, or 0.
func (f *fold) ownCommitted(id string) (uint64, error) {
	c, found, err := f.checkpoint(id)
	if err != nil || !found || c.State != Committed {
		return 0, err
	}
	return c.BegunSeq, nil
}

// ancestors visits a checkpoint of the trial and then its line backwards, until visit
// returns false. Parents always began earlier, so the walk ends.
func ancestors(r Reader, run, trial string, begun uint64, visit func(Checkpoint) (more bool)) error {
	for begun != 0 {
		c, found, err := load[Checkpoint](r, checkpointKey(run, trial, begun))
		if err != nil || !found || !visit(c) {
			return err
		}
		begun = c.ParentSeq
	}
	return nil
}

// rewind makes the checkpoint of that ID the head of the line. Committed checkpoints in
// its line of descent are visible; all others are superseded.
func (f *fold) rewind(id string) error {
	begun, err := f.ownCommitted(id)
	if err != nil {
		return err
	}
	if id == f.trial.Head && begun == f.trial.HeadSeq {
		return nil
	}
	f.trial.Head, f.trial.HeadSeq = id, begun
	line := map[uint64]bool{}
	err = ancestors(f.t, f.run, f.name, begun, func(c Checkpoint) bool {
		line[c.BegunSeq] = true
		return true
	})
	if err != nil {
		return err
	}
	var changed []Checkpoint
	err = each(f.t, key(keyCheckpoint, f.run, f.name), func(c Checkpoint) error {
		if c.BegunSeq == begun {
			c.Withdrawn = false // a resume from it makes it wanted again
		}
		if c.IsFile() {
			return nil
		}
		if superseded := !line[c.BegunSeq] || c.Withdrawn; c.State == Committed && superseded != c.Superseded {
			c.Superseded = superseded
			changed = append(changed, c)
		}
		return nil
	})
	for _, c := range changed {
		if err == nil {
			err = f.put(c)
		}
	}
	return err
}

// extend puts a checkpoint into the line as it is committed, in the order in which
// saves began: two overlapping saves may be committed in either order. A checkpoint of
// an older attempt, or a checkpoint that began before the line took its current course,
// is committed and superseded at once.
func (f *fold) extend(c *Checkpoint) error {
	a, found, err := load[Attempt](f.t, attemptKey(f.run, f.name, c.Attempt))
	if err != nil {
		return err
	}
	from := 0
	if found {
		from = a.segment(c.BegunSeq).From
	}
	if c.Iteration, err = iterationAt(f.t, *c, from); err != nil {
		return err
	}
	if err := f.value(*c, from); err != nil {
		return err
	}
	if c.Attempt < f.trial.Attempt || found && c.BegunSeq < a.last().Seq {
		c.Superseded = true
		return nil
	}
	var later Checkpoint
	err = ancestors(f.t, f.run, f.name, f.trial.HeadSeq, func(old Checkpoint) bool {
		if old.BegunSeq < c.BegunSeq {
			return false
		}
		later = old
		return true
	})
	if err != nil {
		return err
	}
	if later.BegunSeq == 0 {
		c.Parent, c.ParentSeq = f.trial.Head, f.trial.HeadSeq
		f.trial.Head, f.trial.HeadSeq = c.ID, c.BegunSeq
		return nil
	}
	c.Parent, c.ParentSeq = later.Parent, later.ParentSeq
	later.Parent, later.ParentSeq = c.ID, c.BegunSeq
	return f.put(later)
}

// retreat moves the head to the newest visible checkpoint before it if the head is
// gone. Before the start of the trial's own line, the head becomes the other trial's
// checkpoint that the line started from, if any.
func (f *fold) retreat(gone Checkpoint) error {
	if f.trial.HeadSeq != gone.BegunSeq {
		return nil
	}
	id, seq := "", uint64(0)
	err := ancestors(f.t, f.run, f.name, gone.BegunSeq, func(c Checkpoint) bool {
		if c.Visible() {
			id, seq = c.ID, c.BegunSeq
			return false
		}
		if c.ParentSeq == 0 {
			id = c.Parent
		}
		return true
	})
	f.trial.Head, f.trial.HeadSeq = id, seq
	return err
}

// last returns the attempt's current segment.
func (a Attempt) last() Segment { return a.segment(math.MaxUint64) }

// segment returns the segment that contains this sequence.
func (a Attempt) segment(seq uint64) Segment {
	found := Segment{}
	for _, s := range a.Segments {
		if s.Seq <= seq {
			found = s
		}
	}
	return found
}

// newestReport returns the report of an attempt with the highest iteration. Its
// iteration is 0 if there is none.
func newestReport(r Reader, run, trial string, attempt int) (report Report, found bool, err error) {
	prefix := number(key(keyReport, run, trial), uint64(attempt))
	err = each(r, prefix, func(row reportRow) error {
		found = true
		if report, err = row.report(prefix); err != nil {
			return err
		}
		return errFound
	})
	if errors.Is(err, errFound) {
		err = nil
	}
	return report, found, err
}

// iterationAt returns the newest iteration after from of the checkpoint's attempt that
// was reported for a step at or before its own; from if there is none. Rollups whose reports
// are all for later steps are skipped: a run may count the steps of its saves otherwise than
// those of its reports.
func iterationAt(r Reader, c Checkpoint, from int) (int, error) {
	prefix := number(key(keyReport, c.Run, c.Trial), uint64(c.Attempt))
	var raw rawReport
	for lo, next := prefix, -1; ; lo = reportKey(c.Run, c.Trial, c.Attempt, next) {
		at := from
		next = -1
		err := r.Scan(lo, after(prefix), func(k, value []byte) error {
			iteration := iterationOf(k)
			if iteration <= from {
				return errFound
			}
			if err := raw.read(value); err != nil {
				return err
			}
			if raw.step <= c.Step {
				at = iteration
				return errFound
			}
			if iteration%fan != 0 {
				return nil
			}
			var err error
			if next, err = beforeLaterSteps(r, c, iteration); err == nil && next >= 0 {
				err = errFound
			}
			return err
		})
		if err != nil && !errors.Is(err, errFound) || next <= from {
			if errors.Is(err, errFound) {
				err = nil
			}
			return at, err
		}
	}
}

// beforeLaterSteps returns the iteration before the largest rollup that ends with an iteration
// and whose reports are all for steps after the checkpoint's; -1 if there is none.
func beforeLaterSteps(r Reader, c Checkpoint, iteration int) (int, error) {
	level := 1
	for level < topLevel && iteration%spanOf(level+1) == 0 {
		level++
	}
	for ; level > 0; level-- {
		k := rollupKey(c.Run, c.Trial, c.Attempt, level, bucketOf(level, iteration))
		value, err := r.Get(k)
		if err != nil {
			return -1, err
		}
		if value == nil {
			continue
		}
		u, err := decodeRollup(k, value, func([]byte) bool { return false })
		if err != nil {
			return -1, err
		}
		if u.steps[2] > c.Step {
			return u.first - 1, nil
		}
	}
	return -1, nil
}

// reportAt returns the report that stands for a committed checkpoint: the newest of its
// segment, which starts after iteration from, at or before its step. It may be later
// than the commit, because reports are queued and decisions are not. Its iteration is
// at least from, even if there is none.
func reportAt(r Reader, c Checkpoint, from int) (at Report, found bool, err error) {
	if c.Iteration > from {
		if at, found, err = loadReport(r, c.Run, c.Trial, c.Attempt, c.Iteration); err != nil {
			return at, found, err
		}
	}
	at.Iteration = max(c.Iteration, from)
	for {
		next, more, err := loadReport(r, c.Run, c.Trial, c.Attempt, at.Iteration+1)
		if err != nil || !more || !stands(c.Step, next, at.Step, found) {
			return at, found, err
		}
		at, found = next, true
	}
}

// stands reports whether the next report replaces the previous one, if any, at another
// step. Steps grow up to the checkpoint's own, which may be reported several times.
func stands(step int64, next Report, before int64, found bool) bool {
	return next.Step <= step && (!found || next.Step > before || next.Step == step)
}

// window is a stretch of the line within one attempt: the reports with
// from < iteration <= to.
type window struct{ attempt, from, to int }

// windows returns the stretches of a trial's current line, the newest first. It goes
// from each segment to the checkpoint that the segment continues. Nothing of this is
// stored: a report can arrive late, after the resume that makes it part of the past.
func windows(r Reader, t Trial) ([]window, error) {
	a, found, err := load[Attempt](r, attemptKey(t.Run, t.Name, t.Attempt))
	if err != nil || !found {
		return nil, err
	}
	newest, _, err := newestReport(r, t.Run, t.Name, t.Attempt)
	if err != nil {
		return nil, err
	}
	s := a.last()
	line := []window{{t.Attempt, s.From, max(newest.Iteration, s.From)}}
	for s.ResumeSeq != 0 {
		c, found, err := load[Checkpoint](r, checkpointKey(t.Run, t.Name, s.ResumeSeq))
		if err != nil || !found {
			return line, err
		}
		a, found, err := load[Attempt](r, attemptKey(t.Run, t.Name, c.Attempt))
		if err != nil || !found {
			return line, err
		}
		s = a.segment(c.BegunSeq)
		at, _, err := reportAt(r, c, s.From)
		if err != nil {
			return nil, err
		}
		line = append(line, window{c.Attempt, s.From, at.Iteration})
	}
	return line, nil
}
