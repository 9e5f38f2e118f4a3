package projections

import (
	"slices"
	"time"
)

// Standing is where a trial stands: what it has reached, what of it is safe, and the saves
// that are in flight. Its size does not grow with history.
type Standing struct {
	Trial   Trial        `json:"trial"` // as stored, without the fields derived from reports
	Attempt Attempt      `json:"attempt"`
	Nodes   int          `json:"nodes"`          // of its job, as requested; 0: unknown
	Usage   Usage        `json:"usage"`          // of the trial
	Head    *Checkpoint  `json:"head,omitempty"` // newest checkpoint of the line, also one of the run that it was forked from
	Open    []Checkpoint `json:"open,omitempty"` // saves in flight of the attempt, the newest first
	// Step and ReportedAt are those of the attempt's newest report; nil and zero before the first.
	Step       *int64    `json:"step,omitempty"`
	ReportedAt time.Time `json:"reported_at,omitzero"`
}

// RunStanding is where a run stands.
type RunStanding struct {
	Run     Run        `json:"run"`
	Job     Job        `json:"job"`    // the newest; zero without one
	Trials  []Standing `json:"trials"` // by name; those without an attempt are not listed
	Usage   Usage      `json:"usage"`  // of all trials
	Tally   Tally      `json:"tally"`
	Devices []Device   `json:"devices,omitempty"` // that were unhealthy
	HeardAt time.Time  `json:"heard_at,omitzero"` // newest start, end, commit, or other event that moved the time of its main trial
}

// GetRunStanding returns where a run stands, or a [NotFoundError].
func GetRunStanding(r Reader, run string) (s RunStanding, err error) {
	if s.Run, err = GetRun(r, run); err != nil {
		return s, err
	}
	if s.Job, _, err = load[Job](r, key(keyJob, run, s.Run.Job)); err != nil {
		return s, err
	}
	trials, err := all[Trial](r, key(keyTrial, run))
	if err != nil {
		return s, err
	}
	s.Trials = []Standing{}
	for _, t := range trials {
		if t.Attempt == 0 {
			continue
		}
		of, err := standing(r, t)
		if err != nil {
			return s, err
		}
		s.Usage = s.Usage.plus(of.Usage)
		s.Trials = append(s.Trials, of)
	}
	if s.Tally, err = getTally(r, run); err != nil {
		return s, err
	}
	s.Devices, err = Devices(r, run)
	return s, err
}

func standing(r Reader, t Trial) (s Standing, err error) {
	s.Trial = t
	if s.Attempt, _, err = load[Attempt](r, attemptKey(t.Run, t.Name, t.Attempt)); err != nil {
		return s, err
	}
	job, _, err := load[Job](r, key(keyJob, t.Run, t.Job))
	if err != nil {
		return s, err
	}
	s.Nodes = job.NNodes
	if s.Usage, err = trialUsage(r, t.Run, t.Name); err != nil {
		return s, err
	}
	if s.Head, err = headOf(r, t); err != nil {
		return s, err
	}
	if s.Open, err = OpenCheckpoints(r, t.Run, t.Name); err != nil {
		return s, err
	}
	s.Open = slices.DeleteFunc(s.Open, func(c Checkpoint) bool { return c.Attempt != t.Attempt })
	newest, found, err := newestReport(r, t.Run, t.Name, t.Attempt)
	if found {
		s.Step, s.ReportedAt = &newest.Step, newest.Time
	}
	return s, err
}

// headOf returns the checkpoint from which the next attempt of a trial continues; nil if it
// starts afresh, or if that checkpoint is unknown.
func headOf(r Reader, t Trial) (*Checkpoint, error) {
	c, found, err := Checkpoint{}, false, error(nil)
	switch p := t.Parent; {
	case t.HeadSeq != 0:
		c, found, err = load[Checkpoint](r, checkpointKey(t.Run, t.Name, t.HeadSeq))
	case p != nil && t.Head == ParentRef(*p):
		c, found, err = checkpointByID(r, p.Run, p.Trial, p.Checkpoint)
	}
	if err != nil || !found {
		return nil, err
	}
	return &c, nil
}

// Activities returns the runs by name, each with its newest job and when it was last heard of, without
// its trials. It reads four rows of each run, whatever its history.
func Activities(r Reader) ([]RunStanding, error) {
	runs, err := all[Run](r, key(keyRun))
	if err != nil {
		return nil, err
	}
	list := make([]RunStanding, 0, len(runs))
	for _, run := range runs {
		s := RunStanding{Run: run, HeardAt: run.StartedAt}
		if s.Job, _, err = load[Job](r, key(keyJob, run.Name, run.Job)); err != nil {
			return nil, err
		}
		if s.Tally, err = getTally(r, run.Name); err != nil {
			return nil, err
		}
		usage, _, err := load[usageRow](r, usageKey(run.Name, DefaultTrial))
		if err != nil {
			return nil, err
		}
		for _, at := range []time.Time{s.Job.EndedAt, s.Tally.LastCommitAt, usage.Last} {
			if at.After(s.HeardAt) {
				s.HeardAt = at
			}
		}
		list = append(list, s)
	}
	return list, nil
}
