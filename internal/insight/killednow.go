package insight

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/ckptstore/ckptstore/projections"
)

// Fates of a save in flight whose run is killed.
const (
	Finished = "finished" // all ranks have sealed it: the trainer, or the next one on this machine, commits it
	Dropped  = "lost"     // it is aborted, and the next attempt does without it
)

// Deaths that a save in flight survives.
const (
	ByWorkers = "workers" // processes of ranks; the trainer finishes the save
	ByTrainer = "trainer" // also the trainer; the next one finds the sealed bytes in shared memory, or the files
	ByNode    = "node"    // also the machine, as far as its disk survives
)

// KilledNow is what it would cost to kill a run now, as far as its log shows: the checkpoint that the
// next attempt would resume from, and the training that it would repeat.
type KilledNow struct {
	Run     string     `json:"run"`
	Trial   string     `json:"trial"`
	Attempt int        `json:"attempt"`
	Resume  string     `json:"resume"`                 // ID of a checkpoint or save in flight; a reference to one of another run; empty: the next attempt starts afresh
	From    *int64     `json:"resume_step,omitempty"`  // its step, if it is known
	Step    *int64     `json:"step,omitempty"`         // of the attempt's newest report
	Steps   *int64     `json:"steps_lost,omitempty"`   // between the two; of a fresh start, all up to Step
	Seconds float64    `json:"seconds_lost"`           // of training up to the newest event, at most
	Safe    string     `json:"safe,omitempty"`         // ID of the newest committed checkpoint of the line
	Saves   []SaveFate `json:"saves,omitempty"`        // in flight, the newest first
	Without *KilledNow `json:"trainer_dies,omitempty"` // if the trainer dies with its ranks, where that costs more
	Text    string     `json:"text"`
}

// SaveFate is what would become of a save in flight.
type SaveFate struct {
	Checkpoint string   `json:"checkpoint"`
	Step       int64    `json:"step"`
	Ranks      int      `json:"ranks"`   // that take part
	Sealed     int      `json:"sealed"`  // ranks whose bytes are complete in shared memory
	Written    int      `json:"written"` // ranks whose files are durable
	Fate       string   `json:"fate"`    // of a killed rank
	Survives   []string `json:"survives,omitempty"`
}

// survives returns who may die while the save is still finished. The trainer of another machine
// does not find the memory of this one.
func survives(c projections.Checkpoint, nodes int) []string {
	ranks := len(c.Saving())
	switch {
	case ranks == 0 || c.Sealed < ranks:
		return nil
	case c.Writes >= ranks:
		return []string{ByWorkers, ByTrainer, ByNode}
	case nodes > 1:
		return []string{ByWorkers}
	}
	return []string{ByWorkers, ByTrainer}
}

// IfKilled returns what it would cost to kill the ranks of a running trial now. On one node, the
// trainer may die with them. Over several nodes that may cost more, which Without shows.
func IfKilled(s projections.Standing) KilledNow {
	k := ifKilled(s, ByWorkers)
	if without := ifKilled(s, ByTrainer); without.Resume != k.Resume {
		without.Text = "killed with its trainer: " + without.sentence()
		k.Without = &without
	}
	k.Text = "killed now: " + k.sentence()
	if k.Without != nil {
		k.Text += "; " + k.Without.Text
	}
	return k
}

// ifKilled judges the saves by who dies.
func ifKilled(s projections.Standing, dies string) KilledNow {
	k := KilledNow{Run: s.Trial.Run, Trial: s.Trial.Name, Attempt: s.Trial.Attempt, Resume: s.Trial.Head}
	trained, begun := 0.0, uint64(0)
	if c := s.Head; c != nil {
		k.From = &c.Step
		if c.Run == s.Trial.Run && c.Trial == s.Trial.Name {
			k.Safe, trained, begun = c.ID, c.Trained, c.BegunSeq
		}
	}
	for _, c := range s.Open {
		of := SaveFate{
			Checkpoint: c.ID, Step: c.Step, Ranks: len(c.Saving()), Sealed: c.Sealed, Written: c.Writes,
			Fate: Dropped, Survives: survives(c, s.Nodes),
		}
		if slices.Contains(of.Survives, dies) {
			of.Fate = Finished
			if c.BegunSeq > begun { // saves overlap: the line has them in the order in which they began
				k.Resume, k.From, trained, begun = c.ID, &c.Step, c.Trained, c.BegunSeq
			}
		}
		k.Saves = append(k.Saves, of)
	}
	k.Seconds = max(0, s.Usage.Kept-trained)
	k.Step = s.Step
	switch {
	case s.Step == nil:
	case k.From != nil:
		lost := max(0, *s.Step-*k.From)
		k.Steps = &lost
	case k.Resume == "":
		k.Steps = s.Step
	}
	return k
}

// sentence words the verdict.
func (k KilledNow) sentence() string {
	var b strings.Builder
	training := short(k.Seconds) + " of training"
	steps := ""
	if k.Steps != nil {
		steps = fmt.Sprintf("%d steps and ", *k.Steps)
		if *k.Steps == 1 {
			steps = "1 step and "
		}
	}
	if k.Resume == "" {
		fmt.Fprintf(&b, "the next attempt starts afresh and repeats %s%s", steps, training)
	} else {
		fmt.Fprintf(&b, "the next attempt resumes from %s and repeats %s%s", k.Resume, steps, training)
	}
	for _, s := range k.Saves {
		fmt.Fprintf(&b, "; the save of %s, sealed by %d of %d ranks, ", s.Checkpoint, s.Sealed, s.Ranks)
		switch {
		case s.Fate == Dropped:
			b.WriteString("is lost")
		case s.Written >= s.Ranks:
			b.WriteString("is written and is committed")
		default:
			b.WriteString("is finished unless its machine fails")
		}
	}
	return b.String()
}

// short formats seconds with two digits that count, such as 0.4s, 12s, 1m50s.
func short(seconds float64) string {
	d := time.Duration(seconds * float64(time.Second))
	if d < 10*time.Second {
		return d.Round(100 * time.Millisecond).String()
	}
	return d.Round(time.Second).String()
}

// Goodput returns the part of the time of attempts that led to the present; ok is false before
// there is any time.
func Goodput(u projections.Usage) (part float64, ok bool) {
	if u.Wall <= 0 {
		return 0, false
	}
	return u.Kept / u.Wall, true
}

// Interval returns the usual time between two commits of an attempt of a run: the median of the newest
// ones; 0 if no attempt has had two.
func Interval(t projections.Tally) time.Duration {
	if len(t.Gaps) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(t.Gaps))
	return sorted[len(sorted)/2]
}
