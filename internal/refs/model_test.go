package refs_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/refs"
	"pgregory.net/rapid"
)

// histories is the number of histories of one check.
const histories = 30

// TestModel runs random histories of saves, deletions and collections over one bucket without
// links: thousands, or thirty times -rapid.checks.
func TestModel(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		for range histories {
			history(t)
		}
	})
}

func history(t *rapid.T) {
	seed := rapid.SliceOfN(rapid.Uint64(), 2, 2).Draw(t, "seed")
	m := &model{T: t, chance: rand.New(rand.NewPCG(seed[0], seed[1])), bucket: map[refs.Object]bool{}, truth: map[refs.Ref]*made{}, attempts: map[string]int{}, head: refs.New()}
	for i := range m.collectors {
		m.collectors[i] = &collector{ledger: refs.New()}
	}
	m.addTrial("run", "main")
	for range rapid.IntRange(60, 200).Draw(t, "steps") {
		m.step()
		m.check()
	}
	m.finish()
}

// made is a checkpoint as the test knows it, without a ledger.
type made struct {
	state string // open, committed, aborted or deleted
	at    uint64 // of its deletion or abort
	files []events.File
}

// saver is a process with an open save. It may run on although another process has taken its
// trial over, or has ended its save.
type saver struct {
	of      refs.Ref
	attempt int
	bases   []refs.Ref // those that it uses
	ranks   int        // that it has written
}

// collector is a process that removes files, with its own position in the log.
type collector struct {
	ledger *refs.Ledger
	seq    int           // events that its ledger has
	queue  []refs.Object // to be removed
}

type model struct {
	*rapid.T
	chance     *rand.Rand
	log        []events.Recorded
	bucket     map[refs.Object]bool
	truth      map[refs.Ref]*made
	known      []refs.Ref // the keys of truth, in the order of their begin
	trials     []refs.Ref // without a checkpoint
	attempts   map[string]int
	savers     []*saver
	collectors [2]*collector
	head       *refs.Ledger // a ledger at the end of the log
	numbers    int
}

// pick returns a number below n. All are equally likely, unlike the draws of rapid, which are
// mostly small: too few of its histories would have a commit, a deletion and a collection.
func (m *model) pick(n int) int { return m.chance.IntN(n) }

// append adds an event to the log.
func (m *model) append(of refs.Ref, body events.Body) uint64 {
	seq := uint64(len(m.log) + 1)
	stamp := events.Stamp{ID: fmt.Sprint(seq), Source: "test", Time: time.Unix(0, 0)}
	var e events.Event
	if body.Kind().Decides() {
		d, err := events.NewDecision(stamp, events.Aggregate{Run: of.Run, Trial: of.Trial}, body)
		if err != nil {
			m.Fatal(err)
		}
		e = d.Event
	} else {
		f, err := events.NewFact(stamp, events.Scope{Run: of.Run, Trial: of.Trial, Actor: events.Node(0)}, body)
		if err != nil {
			m.Fatal(err)
		}
		e = f.Event
	}
	r := events.Recorded{Event: e, Sequence: seq, Stored: time.Unix(0, 0)}
	m.log = append(m.log, r)
	if err := m.head.Apply(r); err != nil {
		m.Fatal(err)
	}
	return seq
}

func (m *model) addTrial(run, trial string) {
	m.trials = append(m.trials, refs.Ref{Run: run, Trial: trial})
	m.attempts[run+"/"+trial] = 1
}

func (m *model) step() {
	switch what := m.pick(20); {
	case what < 4:
		m.begin()
	case what < 8:
		m.write()
	case what < 10:
		m.commit()
	case what == 10:
		m.abort()
	case what == 11:
		m.crash()
	case what == 12:
		m.takeOver()
	case what < 15:
		m.delete()
	case what == 15:
		m.forkOrRollBack()
	case what < 18:
		m.collect()
	default:
		m.remove()
	}
}

// begin starts a save whose bases are those of an old view: they may be deleted by now.
func (m *model) begin() {
	trial := m.trials[m.pick(len(m.trials))]
	m.numbers++
	attempt := m.attempts[trial.Run+"/"+trial.Trial]
	s := &saver{attempt: attempt, of: trial}
	s.of.Checkpoint = fmt.Sprintf("c%d.a%d", m.numbers, attempt)
	var bases []refs.Ref
	for _, x := range m.known {
		if c := m.truth[x]; (c.state == "committed" || c.state == "deleted") && m.pick(3) > 0 {
			bases = append(bases, x)
		}
	}
	m.append(s.of, &events.CheckpointBegun{Attempt: attempt, Checkpoint: s.of.Checkpoint, Name: "c", WorldSize: 2, Bases: bases})
	m.truth[s.of] = &made{state: "open"}
	m.known = append(m.known, s.of)
	s.bases = m.head.Bases(s.of)
	for _, x := range s.bases {
		if m.truth[x].state != "committed" {
			m.Fatalf("%s may use %s, which was deleted before", s.of, x)
		}
	}
	m.savers = append(m.savers, s)
}

func (m *model) saver() *saver {
	if len(m.savers) == 0 {
		return nil
	}
	return m.savers[m.pick(len(m.savers))]
}

// write makes the files of one rank: one of its own, and references to objects of its bases.
func (m *model) write() {
	s := m.saver()
	if s == nil || s.ranks == 2 {
		return
	}
	own := events.File{Name: fmt.Sprintf("r%05d.safetensors", s.ranks), Size: 1}
	m.bucket[refs.Object{Of: s.of, Name: own.Name}] = true
	files := []events.File{own}
	open := m.truth[s.of].state == "open"
	for _, base := range s.bases {
		for _, f := range m.truth[base].files {
			if m.pick(2) == 0 {
				continue
			}
			if f.From == (refs.Ref{}) {
				f.From = base
			}
			if open && !m.bucket[refs.Object{Of: f.From, Name: f.Name}] {
				m.Fatalf("%s reuses %s of %s, which was removed", s.of, f.Name, f.From)
			}
			if !slices.Contains(files, f) {
				files = append(files, f)
			}
		}
	}
	if m.pick(8) == 0 {
		return
	}
	w := &events.WriteCompleted{Attempt: s.attempt, Checkpoint: s.of.Checkpoint, Rank: s.ranks, Files: files, IndexDigest: "2c"}
	if m.pick(2) == 0 {
		for _, b := range events.JoinWrites([]*events.WriteCompleted{w}) {
			m.append(s.of, b)
		}
	} else {
		m.append(s.of, w)
	}
	s.ranks++
	if open {
		m.truth[s.of].files = append(m.truth[s.of].files, files...)
	}
}

// decides reports whether the log accepts decisions of a saver about its save.
func (m *model) decides(s *saver) bool {
	return m.truth[s.of].state == "open" && m.attempts[s.of.Run+"/"+s.of.Trial] == s.attempt
}

func (m *model) commit() {
	if s := m.saver(); s != nil && s.ranks > 0 && m.decides(s) {
		m.append(s.of, &events.CheckpointCommitted{Attempt: s.attempt, Checkpoint: s.of.Checkpoint})
		m.truth[s.of].state = "committed"
	}
}

func (m *model) end(of refs.Ref, state string, body events.Body) {
	m.truth[of].at = m.append(of, body)
	m.truth[of].state = state
}

// abort ends a save. The saver removes its files, unless it crashes before.
func (m *model) abort() {
	s := m.saver()
	if s == nil {
		return
	}
	if m.decides(s) {
		m.end(s.of, "aborted", &events.CheckpointAborted{Attempt: s.attempt, Checkpoint: s.of.Checkpoint, Reason: "test"})
	}
	if m.truth[s.of].state == "aborted" && m.pick(2) == 0 {
		maps.DeleteFunc(m.bucket, func(o refs.Object, _ bool) bool { return o.Of == s.of })
	}
}

// crash ends a saver. Its save stays open.
func (m *model) crash() {
	if s := m.saver(); s != nil {
		m.savers = slices.DeleteFunc(m.savers, func(x *saver) bool { return x == s })
	}
}

// takeOver starts another attempt of a trial while the processes of the last one may still run.
// It finishes some of the open saves, and aborts the others.
func (m *model) takeOver() {
	trial := m.trials[m.pick(len(m.trials))]
	name := trial.Run + "/" + trial.Trial
	m.attempts[name]++
	for _, x := range m.known {
		if m.truth[x].state != "open" || x.Run != trial.Run || x.Trial != trial.Trial {
			continue
		}
		if m.pick(2) == 0 {
			m.savers = append(m.savers, &saver{of: x, attempt: m.attempts[name], bases: m.head.Bases(x)})
			continue
		}
		m.end(x, "aborted", &events.CheckpointAborted{Attempt: m.attempts[name], Checkpoint: x.Checkpoint, Reason: "test"})
	}
}

func (m *model) delete() {
	x, ok := m.committed()
	if ok {
		m.end(x, "deleted", &events.CheckpointDeleted{Checkpoint: x.Checkpoint, Reason: "test"})
	}
}

func (m *model) committed() (refs.Ref, bool) {
	var all []refs.Ref
	for _, x := range m.known {
		if m.truth[x].state == "committed" {
			all = append(all, x)
		}
	}
	if len(all) == 0 {
		return refs.Ref{}, false
	}
	return all[m.pick(len(all))], true
}

func (m *model) forkOrRollBack() {
	x, ok := m.committed()
	switch {
	case !ok:
	case len(m.trials) < 3 && m.pick(2) == 0:
		m.addTrial(fmt.Sprint("run", len(m.trials)%2), fmt.Sprint("fork", len(m.trials)))
		m.append(m.trials[len(m.trials)-1], &events.TrialCreated{Parent: &events.TrialParent{Run: x.Run, Trial: x.Trial, Checkpoint: x.Checkpoint}})
	default:
		m.append(x, &events.CheckpointSuperseded{Checkpoint: x.Checkpoint, Reason: "test"})
	}
}

// collect decides at some position of the log, which may be an old one. What it removes, it
// removes later. Removals of an earlier decision are lost, as in a crash.
func (m *model) collect() {
	c := m.collectors[m.pick(len(m.collectors))]
	m.advance(c, c.seq+m.pick(len(m.log)-c.seq+1))
}

func (m *model) advance(c *collector, to int) {
	for ; c.seq < to; c.seq++ {
		if err := c.ledger.Apply(m.log[c.seq]); err != nil {
			m.Fatal(err)
		}
	}
	c.queue = nil
	for _, o := range slices.SortedFunc(maps.Keys(m.bucket), func(a, b refs.Object) int {
		return slices.Compare([]string{a.Of.String(), a.Name}, []string{b.Of.String(), b.Name})
	}) {
		if c.ledger.Gone(o.Of) && !c.ledger.Kept(o.Of).Keeps(o.Name) {
			c.queue = append(c.queue, o)
		}
	}
}

// remove continues a collection.
func (m *model) remove() {
	c := m.collectors[m.pick(len(m.collectors))]
	if len(c.queue) > 0 {
		delete(m.bucket, c.queue[0])
		c.queue = c.queue[1:]
	}
}

// check requires that every committed checkpoint that is not deleted has all its objects, and
// names the checkpoint that wrote each.
func (m *model) check() {
	for x, c := range m.truth {
		if c.state != "committed" {
			continue
		}
		for _, f := range c.files {
			o := refs.Object{Of: x, Name: f.Name}
			if f.From != (refs.Ref{}) {
				o.Of = f.From
				if !slices.ContainsFunc(m.truth[o.Of].files, func(own events.File) bool { return own.Name == f.Name && own.From == refs.Ref{} }) {
					m.Fatalf("%s names %s of %s, which did not write it", x, f.Name, o.Of)
				}
			}
			if !m.bucket[o] {
				m.Fatalf("%s of %s is gone, but %s needs it", o.Name, o.Of, x)
			}
		}
	}
}

// finish ends all saves and processes, and collects: only objects of need stay.
func (m *model) finish() {
	for _, x := range m.known {
		if m.truth[x].state == "open" {
			m.end(x, "aborted", &events.CheckpointAborted{Attempt: 9, Checkpoint: x.Checkpoint, Reason: "test"})
		}
	}
	needed := map[refs.Object]bool{}
	for x, c := range m.truth {
		if c.state != "committed" {
			continue
		}
		for o := range m.bucket {
			if o.Of == x {
				needed[o] = true
			}
		}
		for _, f := range c.files {
			if f.From != (refs.Ref{}) {
				needed[refs.Object{Of: f.From, Name: f.Name}] = true
			}
		}
	}
	c := m.collectors[0]
	m.advance(c, len(m.log))
	for _, o := range c.queue {
		delete(m.bucket, o)
	}
	m.check()
	if !maps.Equal(m.bucket, needed) {
		m.Fatalf("left %v, needed %v", m.bucket, needed)
	}
}
