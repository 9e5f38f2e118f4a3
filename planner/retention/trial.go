package retention

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/projections"
)

// Trial is the input of a decision about the checkpoints of one trial.
type Trial struct {
	Run     string `json:"run"`
	Name    string `json:"name"`
	LaneSeq uint64 `json:"lane_seq"` // a decision is conditional on it
	// Checkpoints are those of the trial in every state, the newest begun first.
	Checkpoints []projections.Checkpoint `json:"checkpoints"`
	// Values holds the requested metrics of the line, by metric and checkpoint ID. A metric
	// that is not a number has no value.
	Values map[string]map[string]Value `json:"values,omitempty"`
	// Holds lists, by checkpoint ID, why other trials, and workers, need it.
	Holds map[string][]string `json:"holds,omitempty"`
	// Loading lists the IDs that a restore in progress reads.
	Loading []string `json:"loading,omitempty"`
	// Newest is the ID of the newest checkpoint in the line, or of the trial if the line has
	// none; empty if none is committed. Files lists the files that its ranks wrote.
	Newest string        `json:"newest,omitempty"`
	Files  []events.File `json:"files,omitempty"`
}

// Value is a number that can be encoded in JSON even if it is infinite.
type Value float64

// MarshalJSON implements [json.Marshaler].
func (v Value) MarshalJSON() ([]byte, error) {
	return []byte(strconv.Quote(strconv.FormatFloat(float64(v), 'g', -1, 64))), nil
}

// UnmarshalJSON implements [json.Unmarshaler].
func (v *Value) UnmarshalJSON(text []byte) error {
	var s string
	if err := json.Unmarshal(text, &s); err != nil {
		return err
	}
	n, err := strconv.ParseFloat(s, 64)
	*v = Value(n)
	return err
}

// holds returns the reasons for which a checkpoint stays under every policy.
func (t Trial) holds(c projections.Checkpoint) []string {
	var why []string
	if c.ID == t.Newest {
		why = append(why, "the newest")
	}
	if c.Pinned {
		why = append(why, "pinned")
	}
	for _, tag := range c.Tags {
		why = append(why, fmt.Sprintf("tagged %q", tag))
	}
	return append(why, t.Holds[c.ID]...)
}

// Read collects the input of a decision about the trials of a run, with the values of
// metrics. Trials of other runs may need a checkpoint of this one: [Others] finds those
// needs, and [Hold] adds them.
func Read(r projections.Reader, run string, metrics []string) ([]Trial, error) {
	if _, err := projections.GetRun(r, run); err != nil {
		return nil, err
	}
	rows, err := projections.Trials(r, run)
	if err != nil {
		return nil, err
	}
	all, err := projections.Checkpoints(r, run, true)
	if err != nil {
		return nil, err
	}
	own := []Need{}
	for _, row := range rows {
		some, err := needsOf(r, row)
		if err != nil {
			return nil, err
		}
		own = append(own, some...)
	}
	needs := byCheckpoint(own)
	of := map[string][]projections.Checkpoint{}
	for _, c := range all {
		of[c.Trial] = append(of[c.Trial], c)
	}
	trials := make([]Trial, len(rows))
	for i, row := range rows {
		t := Trial{Run: run, Name: row.Name, LaneSeq: row.LaneSeq, Checkpoints: of[row.Name]}
		if t.Checkpoints == nil {
			t.Checkpoints = []projections.Checkpoint{}
		}
		t.Holds = map[string][]string{}
		needs.hold(&t)
		if err := t.fill(r, metrics); err != nil {
			return nil, err
		}
		trials[i] = t
	}
	return trials, nil
}

// fill reads the newest checkpoint's files and the values of metrics.
func (t *Trial) fill(r projections.Reader, metrics []string) error {
	newest := t.newest()
	if newest.ID != "" {
		t.Newest = newest.ID
		writes, err := projections.Writes(r, t.Run, t.Name, newest.ID)
		if err != nil {
			return err
		}
		for _, w := range writes {
			t.Files = append(t.Files, w.Files...)
		}
	}
	t.Values = map[string]map[string]Value{}
	for _, metric := range metrics {
		values := map[string]Value{}
		for _, c := range t.Checkpoints {
			if !c.Visible() {
				continue
			}
			v, ok, err := projections.MetricAt(r, c, metric)
			if err != nil {
				return err
			}
			if ok && !math.IsNaN(v) {
				values[c.ID] = Value(v)
			}
		}
		t.Values[metric] = values
	}
	return nil
}

// newest returns the newest checkpoint of the line. When a run was started afresh (--resume none) its
// line has none for a while: then it is the newest of the trial, except removed ones.
func (t Trial) newest() projections.Checkpoint {
	newest := func(in func(projections.Checkpoint) bool) (found projections.Checkpoint) {
		for _, c := range t.Checkpoints {
			if in(c) && c.BegunSeq >= found.BegunSeq {
				found = c
			}
		}
		return found
	}
	if c := newest(func(c projections.Checkpoint) bool { return c.Visible() && !c.IsFile() }); c.ID != "" {
		return c
	}
	return newest(func(c projections.Checkpoint) bool {
		return c.State == projections.Committed && !c.Withdrawn && !c.IsFile()
	})
}

// Need is a checkpoint that a trial needs.
type Need struct {
	Run     string `json:"run,omitempty"` // of the checkpoint; empty: any
	Trial   string `json:"trial,omitempty"`
	ID      string `json:"id"` // or RUN@ID, or RUN/TRIAL@ID
	Why     string `json:"why"`
	Head    bool   `json:"head,omitempty"`
	Loading bool   `json:"loading,omitempty"`
}

// needs finds the needs of a checkpoint by the names used for it.
type needs struct {
	all []Need
	at  map[string][]int
}

func byCheckpoint(all []Need) needs {
	n := needs{all, map[string][]int{}}
	for i, need := range all {
		n.at[need.ID] = append(n.at[need.ID], i)
	}
	return n
}

func (n needs) hold(t *Trial) {
	if t.Holds == nil {
		t.Holds = map[string][]string{}
	}
	newest := t.newest().ID
	for _, c := range t.Checkpoints {
		for _, i := range n.at[c.ID] {
			n := n.all[i]
			if (n.Run == "" || n.Run == t.Run) && (n.Trial == "" || n.Trial == t.Name) && !(n.Head && c.ID == newest) { // which is the same reason
				n.hold(t, c)
			}
		}
		for _, name := range []string{c.Run + "@" + c.ID, c.Run + "/" + c.Trial + "@" + c.ID} {
			for _, i := range n.at[name] {
				n.all[i].hold(t, c)
			}
		}
	}
}

func (n Need) hold(t *Trial, c projections.Checkpoint) {
	if !slices.Contains(t.Holds[c.ID], n.Why) {
		t.Holds[c.ID] = append(t.Holds[c.ID], n.Why)
	}
	if n.Loading && !slices.Contains(t.Loading, c.ID) {
		t.Loading = append(t.Loading, c.ID)
	}
}

// Hold adds the needs of others to the trials of a run.
func Hold(trials []Trial, others []Need) {
	needs := byCheckpoint(others)
	for i := range trials {
		needs.hold(&trials[i])
	}
}

// Others returns the needs of all trials that may refer to another run: few, but every trial
// is read to find them. A collection of many runs calls it once.
func Others(r projections.Reader) (found []Need, err error) {
	found = []Need{}
	err = projections.EachTrial(r, func(t projections.Trial) error {
		all, err := needsOf(r, t)
		for _, n := range all {
			if n.Run != t.Run || strings.Contains(n.ID, "@") {
				found = append(found, n)
			}
		}
		return err
	})
	return found, err
}

// needsOf returns the needs of a trial.
func needsOf(r projections.Reader, t projections.Trial) (all []Need, err error) {
	name := t.Run + "/" + t.Name
	if p := t.Parent; p != nil {
		all = append(all, Need{Run: p.Run, Trial: p.Trial, ID: p.Checkpoint, Why: name + " was forked from it"})
	}
	if t.Head != "" {
		all = append(all, Need{Run: t.Run, Trial: t.Name, ID: t.Head, Why: "the head of " + name, Head: true})
	}
	live, err := loads(r, t)
	return append(all, live...), err
}

// loads returns the checkpoints that the live attempt of a trial reads or will read.
func loads(r projections.Reader, t projections.Trial) (all []Need, err error) {
	attempts, err := projections.Attempts(r, t.Run, t.Name)
	if err != nil {
		return nil, err
	}
	at := slices.IndexFunc(attempts, func(a projections.Attempt) bool { return a.Attempt == t.Attempt })
	if at < 0 || !attempts[at].StoppedAt.IsZero() {
		return nil, nil
	}
	a := attempts[at]
	over, err := ended(r, t.Run, a.Job)
	if err != nil || over {
		return nil, err
	}
	restores, err := projections.Restores(r, t.Run, t.Name, a.Attempt)
	if err != nil {
		return nil, err
	}
	restored := false
	for _, load := range restores {
		need := Need{Run: t.Run, Trial: t.Name, ID: load.Checkpoint, Why: fmt.Sprintf("%s/%s is loading it", t.Run, t.Name), Loading: true}
		if load.From != "" {
			need.Run, need.Trial, _ = strings.Cut(load.From, "/")
		}
		if load.EndedSeq == 0 {
			all = append(all, need)
			continue
		}
		restored = restored || load.From == "" && load.Checkpoint == a.Resume || need.Run+"@"+need.ID == a.Resume || need.Run+"/"+need.Trial+"@"+need.ID == a.Resume
	}
	// A trial that has saved has loaded before, or never will.
	if head, err := projections.GetCheckpoint(r, t.Run, t.Name, t.Head); err == nil {
		restored = restored || head.Attempt == a.Attempt
	} else if !errors.Is(err, projections.ErrNotFound) {
		return nil, err
	}
	if a.Resume != "" && !restored {
		all = append(all, Need{Run: t.Run, Trial: t.Name, ID: a.Resume, Why: fmt.Sprintf("attempt %d of %s/%s resumes from it", a.Attempt, t.Run, t.Name)})
	}
	return all, nil
}

// ended reports whether the job of an attempt reported its end.
func ended(r projections.Reader, run, id string) (bool, error) {
	jobs, err := projections.Jobs(r, run)
	if errors.Is(err, projections.ErrNotFound) {
		return false, nil
	}
	return slices.ContainsFunc(jobs, func(j projections.Job) bool { return j.ID == id && j.Ended }), err
}
