package projections

import (
	"cmp"
	"slices"
	"strings"
)

// Launches holds the jobs, trials and attempts of one run, without its checkpoints and
// reports: its size does not grow with either.
type Launches struct {
	Run      string    `json:"run"`
	Jobs     []Job     `json:"jobs"`     // the newest first
	Trials   []Trial   `json:"trials"`   // as stored, without the fields derived from reports
	Attempts []Attempt `json:"attempts"` // of each trial, the oldest first
	Devices  []Device  `json:"devices,omitempty"`
	Usage    Usage     `json:"usage"` // of all trials
}

// AllLaunches lists the launches of a run, or of every run by name if run is empty. A
// run that does not exist has none. With newest, only the newest job of a run is listed,
// and its attempts: the rows of others are not read.
func AllLaunches(r Reader, run string, newest bool) ([]Launches, error) {
	if newest {
		return newestLaunches(r, run)
	}
	byRun := map[string]*Launches{}
	within := func(kind byte) []byte {
		if run == "" {
			return key(kind)
		}
		return key(kind, run)
	}
	of := func(name string) *Launches {
		if byRun[name] == nil {
			byRun[name] = &Launches{Run: name}
		}
		return byRun[name]
	}
	visits := []func() error{
		func() error {
			return each(r, within(keyRun), func(row Run) error { of(row.Name); return nil })
		},
		func() error {
			return each(r, within(keyJob), func(row Job) error {
				l := of(row.Run)
				l.Jobs = append(l.Jobs, row)
				return nil
			})
		},
		func() error {
			return each(r, within(keyTrial), func(row Trial) error {
				l := of(row.Run)
				l.Trials = append(l.Trials, row)
				used, err := trialUsage(r, row.Run, row.Name)
				l.Usage = l.Usage.plus(used)
				return err
			})
		},
		func() error {
			return each(r, within(keyAttempt), func(row Attempt) error {
				l := of(row.Run)
				l.Attempts = append(l.Attempts, row)
				return nil
			})
		},
		func() error {
			return each(r, within(keyDevice), func(row Device) error {
				l := of(row.Run)
				l.Devices = append(l.Devices, row)
				return nil
			})
		},
	}
	for _, visit := range visits {
		if err := visit(); err != nil {
			return nil, err
		}
	}
	list := make([]Launches, 0, len(byRun))
	for _, l := range byRun {
		slices.SortStableFunc(l.Jobs, newestJob)
		slices.SortStableFunc(l.Trials, func(a, b Trial) int { return strings.Compare(a.Name, b.Name) })
		list = append(list, *l)
	}
	slices.SortFunc(list, func(a, b Launches) int { return strings.Compare(a.Run, b.Run) })
	return list, nil
}

// newestLaunches lists the launches of a run, or of every run, each with its newest job.
func newestLaunches(r Reader, run string) ([]Launches, error) {
	runs, err := all[Run](r, key(keyRun))
	if run != "" {
		var row Run
		var found bool
		runs = nil
		if row, found, err = load[Run](r, key(keyRun, run)); found {
			runs = []Run{row}
		}
	}
	if err != nil {
		return nil, err
	}
	list := make([]Launches, len(runs))
	for i, row := range runs {
		l := &list[i]
		l.Run = row.Name
		if err := l.newest(r, row.Job); err != nil {
			return nil, err
		}
	}
	slices.SortFunc(list, func(a, b Launches) int { return strings.Compare(a.Run, b.Run) })
	return list, nil
}

// newest reads the rows of a run with one job.
func (l *Launches) newest(r Reader, job string) (err error) {
	row, found, err := load[Job](r, key(keyJob, l.Run, job))
	if err != nil {
		return err
	}
	if found {
		l.Jobs = []Job{row}
	}
	if l.Trials, err = all[Trial](r, key(keyTrial, l.Run)); err != nil {
		return err
	}
	slices.SortStableFunc(l.Trials, func(a, b Trial) int { return strings.Compare(a.Name, b.Name) })
	for _, t := range l.Trials {
		used, err := trialUsage(r, l.Run, t.Name)
		if err != nil {
			return err
		}
		l.Usage = l.Usage.plus(used)
		begin := len(l.Attempts)
		for n := t.Attempt; n > 0; n-- { // a job's attempts follow each other
			a, found, err := load[Attempt](r, attemptKey(l.Run, t.Name, n))
			if err != nil {
				return err
			}
			if !found || a.Job != job {
				break
			}
			l.Attempts = append(l.Attempts, a)
		}
		slices.Reverse(l.Attempts[begin:])
	}
	l.Devices, err = all[Device](r, key(keyDevice, l.Run))
	return err
}

// newestJob orders jobs by their start, the newest first. A job without a start event
// counts from its end.
func newestJob(a, b Job) int {
	return cmp.Compare(cmp.Or(b.StartedSeq, b.EndedSeq), cmp.Or(a.StartedSeq, a.EndedSeq))
}
