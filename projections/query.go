package projections

import (
	"cmp"
	"errors"
	"slices"
	"strings"

	"github.com/ckptstore/ckptstore/events"
)

// Runs returns all runs by name.
func Runs(r Reader) ([]Run, error) {
	runs, err := all[Run](r, key(keyRun))
	slices.SortFunc(runs, func(a, b Run) int { return strings.Compare(a.Name, b.Name) })
	return runs, err
}

// GetRun returns one run, or a [NotFoundError].
func GetRun(r Reader, name string) (Run, error) {
	run, found, err := load[Run](r, key(keyRun, name))
	if err != nil || found {
		return run, err
	}
	runs, err := Runs(r)
	if err != nil {
		return run, err
	}
	return run, notFound("run", name, names(runs, func(run Run) string { return run.Name }))
}

// Jobs returns the jobs of a run, the newest first.
func Jobs(r Reader, run string) ([]Job, error) {
	jobs, err := all[Job](r, key(keyJob, run))
	slices.SortStableFunc(jobs, newestJob)
	return jobs, err
}

// Trials returns the trials of a run by name.
func Trials(r Reader, run string) ([]Trial, error) {
	trials, err := all[Trial](r, key(keyTrial, run))
	for i := range trials {
		if err == nil {
			err = derive(r, &trials[i])
		}
	}
	slices.SortFunc(trials, func(a, b Trial) int { return strings.Compare(a.Name, b.Name) })
	return trials, err
}

// GetTrial returns one trial, or a [NotFoundError].
func GetTrial(r Reader, run, trial string) (Trial, error) {
	t, found, err := load[Trial](r, trialKey(run, trial))
	if err != nil {
		return t, err
	}
	if found {
		return t, derive(r, &t)
	}
	if _, err := GetRun(r, run); err != nil {
		return t, err
	}
	trials, err := all[Trial](r, key(keyTrial, run))
	if err != nil {
		return t, err
	}
	return t, notFound("trial", run+"/"+trial, names(trials, func(t Trial) string { return run + "/" + t.Name }))
}

// derive fills in the fields that follow from the reports of the line.
func derive(r Reader, t *Trial) error {
	line, err := windows(r, *t)
	if err != nil {
		return err
	}
	for _, w := range line {
		if t.Iterations += w.to - w.from; t.LastMetrics != nil || w.to == w.from {
			continue
		}
		last, _, err := loadReport(r, t.Run, t.Name, w.attempt, w.to)
		if err != nil {
			return err
		}
		t.LastMetrics = last.Metrics
	}
	return nil
}

// Attempts returns the attempts of a trial, the oldest first.
func Attempts(r Reader, run, trial string) ([]Attempt, error) {
	return all[Attempt](r, key(keyAttempt, run, trial))
}

// Workers returns the ranks of an attempt in order.
func Workers(r Reader, run, trial string, attempt int) ([]Worker, error) {
	return all[Worker](r, number(key(keyWorker, run, trial), uint64(attempt)))
}

// Restores returns the loads of an attempt in order.
func Restores(r Reader, run, trial string, attempt int) ([]Restore, error) {
	return all[Restore](r, number(key(keyRestore, run, trial), uint64(attempt)))
}

// Checkpoints returns the checkpoints of all trials of a run, the newest begun first.
// Unless everything is set, it returns only committed checkpoints in the current line.
func Checkpoints(r Reader, run string, everything bool) ([]Checkpoint, error) {
	trials, err := all[Trial](r, key(keyTrial, run))
	if err != nil {
		return nil, err
	}
	var rows []Checkpoint
	for _, t := range trials {
		err := each(r, key(keyCheckpoint, run, t.Name), func(c Checkpoint) error {
			if everything || c.Visible() {
				rows = append(rows, c)
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	if len(trials) > 1 {
		slices.SortFunc(rows, func(a, b Checkpoint) int { return cmp.Compare(b.BegunSeq, a.BegunSeq) })
	}
	return rows, nil
}

// errEnough ends a scan early.
var errEnough = errors.New("enough rows")

// CheckpointsPage returns at most limit of the checkpoints that [Checkpoints] returns: those
// that began before a sequence, or the newest with before 0. It reads no more rows than it
// needs of each trial, and hidden ones on the way.
func CheckpointsPage(r Reader, run string, everything bool, before uint64, limit int) ([]Checkpoint, error) {
	trials, err := all[Trial](r, key(keyTrial, run))
	if err != nil || limit <= 0 {
		return nil, err
	}
	var rows []Checkpoint
	for _, t := range trials {
		prefix := key(keyCheckpoint, run, t.Name)
		lo, hi := prefix, after(prefix)
		if before > 0 {
			lo = checkpointKey(run, t.Name, before-1)
		}
		n := 0
		err := r.Scan(lo, hi, func(k, value []byte) error {
			var c Checkpoint
			if err := decode(k, value, &c); err != nil {
				return err
			}
			if !everything && !c.Visible() {
				return nil
			}
			rows = append(rows, c)
			if n++; n == limit {
				return errEnough
			}
			return nil
		})
		if err != nil && !errors.Is(err, errEnough) {
			return nil, err
		}
	}
	if len(trials) > 1 {
		slices.SortFunc(rows, func(a, b Checkpoint) int { return cmp.Compare(b.BegunSeq, a.BegunSeq) })
	}
	return rows[:min(len(rows), limit)], nil
}

// GetCheckpoint returns the checkpoint of a full ID in any state, or a [NotFoundError].
func GetCheckpoint(r Reader, run, trial, id string) (Checkpoint, error) {
	c, found, err := checkpointByID(r, run, trial, id)
	if err != nil || found {
		return c, err
	}
	if _, err := GetTrial(r, run, trial); err != nil {
		return c, err
	}
	ids, err := identifiers(r, run, trial, "")
	if err != nil {
		return c, err
	}
	return c, notFound("checkpoint", id, ids)
}

// OpenCheckpoints returns the saves of a trial in progress, the newest first.
func OpenCheckpoints(r Reader, run, trial string) ([]Checkpoint, error) {
	var rows []Checkpoint
	prefix := key(keyOpen, run, trial)
	err := r.Scan(prefix, after(prefix), func(k, _ []byte) error {
		k = append(key(keyCheckpoint, run, trial), k[len(prefix):]...)
		c, _, err := load[Checkpoint](r, k)
		rows = append(rows, c)
		return err
	})
	return rows, err
}

// Writes returns the ranks' writes for a checkpoint, by rank.
func Writes(r Reader, run, trial, checkpoint string) ([]Write, error) {
	return all[Write](r, key(keyWrite, run, trial, checkpoint))
}

// Reports returns the reports of the trial's current line, the oldest first: of each
// attempt up to where the next one resumed. It excludes reports of a trial that this
// one was forked from. [Metrics] returns a part of them.
func Reports(r Reader, run, trial string) ([]Report, error) {
	t, found, err := load[Trial](r, trialKey(run, trial))
	if err != nil || !found {
		return nil, err
	}
	line, err := lineBranches(r, t)
	if err != nil {
		return nil, err
	}
	var rows []Report
	for _, b := range slices.Backward(line) {
		start := len(rows)
		lo := reportKey(run, trial, b.attempt, b.to)
		hi := reportKey(run, trial, b.attempt, b.from)
		err := r.Scan(lo, hi, func(k, value []byte) error {
			report, err := decodeReport(k, value)
			report.LineIteration = b.base + report.Iteration - b.from
			rows = append(rows, report)
			return err
		})
		if err != nil {
			return nil, err
		}
		slices.Reverse(rows[start:])
	}
	return rows, nil
}

func decodeReport(k, value []byte) (Report, error) {
	var row reportRow
	if err := decode(k, value, &row); err != nil {
		return Report{}, err
	}
	return row.report(k)
}

func (row reportRow) report(k []byte) (Report, error) {
	var b events.Metrics
	err := decode(k, row.Report, &b)
	return Report{
		Sequence: row.Sequence, Time: row.Time, Attempt: b.Attempt, Iteration: b.Iteration,
		Step: b.Step, Metrics: b.Metrics, Others: b.Others, Summary: b.Summary, Seconds: b.Seconds,
	}, err
}

func loadReport(r Reader, run, trial string, attempt, iteration int) (Report, bool, error) {
	k := reportKey(run, trial, attempt, iteration)
	value, err := r.Get(k)
	if err != nil || value == nil {
		return Report{}, false, err
	}
	report, err := decodeReport(k, value)
	return report, err == nil, err
}

// identifiers returns the IDs of a trial that start with prefix.
func identifiers(r Reader, run, trial, prefix string) ([]string, error) {
	var ids []string
	start := idKey(run, trial, "")
	lo := idKey(run, trial, prefix)
	err := r.Scan(lo, after(lo), func(k, _ []byte) error {
		ids = append(ids, string(k[len(start):]))
		return nil
	})
	return ids, err
}

// EachTrial calls visit for the trials of all runs, with the contents of their rows. It
// omits the fields derived from reports, which would take longer than everything else.
func EachTrial(r Reader, visit func(Trial) error) error { return each(r, key(keyTrial), visit) }

// ParentRef returns the reference to the checkpoint that a trial was forked from.
func ParentRef(p events.TrialParent) string {
	if p.Trial == DefaultTrial {
		return p.Run + "@" + p.Checkpoint
	}
	return p.Run + "/" + p.Trial + "@" + p.Checkpoint
}

// Replicas lists the newest replicas of the nodes of a run, by trial and node.
func Replicas(r Reader, run string) ([]Replica, error) {
	return all[Replica](r, key(keyReplica, run))
}
