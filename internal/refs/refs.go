// Package refs decides which files of deleted checkpoints must stay where files have no links:
// later checkpoints then name the files of earlier ones.
//
//	object   a data file, in the directory of the checkpoint that wrote it
//	from     a file in write.completed that lies in another checkpoint's directory; it
//	         names the object itself, never a checkpoint that also reuses it
//	base     a committed checkpoint whose objects a save may name, listed in
//	         checkpoint.begun
//	gone     a checkpoint that was deleted or aborted
//
// The law: object O of checkpoint X may be removed if and only if, at a position of the log,
//
//  1. X is gone,
//  2. no committed checkpoint that is not gone has a file from O, and
//  3. no open save has X as a base, or a base with a file from O.
//
// A save appends checkpoint.begun with its bases first. It then uses only those bases that were
// not gone at that position of the log: [Ledger.Bases]. The log is a total order. Either the
// deletion of X comes first, and the save does not use X, or checkpoint.begun comes first, and
// every position that has the deletion also has the base. So a collection may decide at any
// position, however old, and remove files at any later time, without a lock.
//
// A [Ledger] is a pure fold of the log. Of a checkpoint that is gone it keeps only that, once no
// open save has it as a base.
package refs

import (
	"cmp"
	"maps"
	"slices"

	"github.com/ckptstore/ckptstore/events"
)

// Ref names a checkpoint.
type Ref = events.CheckpointRef

// Object is a data file of the checkpoint that wrote it.
type Object struct {
	Of   Ref
	Name string // in its directory
}

// Ledger is the state of all references at one position of the log. It is not safe for
// concurrent use.
type Ledger struct {
	checkpoints map[Ref]*entry
	users       map[Ref]map[Ref]bool // checkpoints with files from one
	saves       map[Ref]map[Ref]bool // open saves that have one as a base
	seq         uint64
}

// state is the part of a checkpoint's life that matters here.
type state int

const (
	unknown state = iota // of a checkpoint with facts alone
	open
	committed
	gone
)

// entry is one checkpoint.
type entry struct {
	state state
	bases []Ref // while it is open
	from  map[Object]bool
}

// New returns the ledger of an empty log.
func New() *Ledger {
	return &Ledger{checkpoints: map[Ref]*entry{}, users: map[Ref]map[Ref]bool{}, saves: map[Ref]map[Ref]bool{}}
}

// Sequence returns the position of the log, 0 before the first event.
func (l *Ledger) Sequence() uint64 { return l.seq }

// Apply folds one event. Events are applied in the order of the log, and all of them. After an
// error the ledger is at the position before the event.
func (l *Ledger) Apply(r events.Recorded) error {
	var body events.Body
	if family := r.Kind.Family(); family == "checkpoint" || family == "write" {
		var err error
		if body, err = r.Body(); err != nil {
			return err
		}
	}
	l.seq = r.Sequence
	at := func(id string) Ref { return Ref{Run: r.Scope.Run, Trial: r.Scope.Trial, Checkpoint: id} }
	switch b := body.(type) {
	case *events.CheckpointBegun:
		l.begin(at(b.Checkpoint), b.Bases)
	case *events.WriteCompleted:
		l.wrote(at(b.Checkpoint), b.Files)
	case *events.NodeWrite:
		for w := range b.Each() {
			l.wrote(at(b.Checkpoint), w.Files)
		}
	case *events.CheckpointCommitted:
		if e := l.entry(at(b.Checkpoint)); e.state == unknown || e.state == open {
			l.move(at(b.Checkpoint), committed)
		}
	case *events.CheckpointAborted:
		if l.entry(at(b.Checkpoint)).state == open {
			l.move(at(b.Checkpoint), gone)
		}
	case *events.CheckpointDeleted:
		l.Suppose(at(b.Checkpoint))
	}
	return nil
}

func (l *Ledger) entry(x Ref) *entry {
	e := l.checkpoints[x]
	if e == nil {
		e = &entry{}
		l.checkpoints[x] = e
	}
	return e
}

// begin opens a save. Its bases are those of the list that exist at this position.
func (l *Ledger) begin(x Ref, bases []Ref) {
	e := l.entry(x)
	if e.state != unknown {
		return
	}
	e.state = open
	for _, base := range bases {
		if b := l.checkpoints[base]; b != nil && b.state == committed && !slices.Contains(e.bases, base) {
			e.bases = append(e.bases, base)
			add(l.saves, base, x)
		}
	}
}

// wrote adds the files of a rank. If a rank's files are reported twice, both reports count.
// The files of a checkpoint that has ended no longer change.
func (l *Ledger) wrote(x Ref, files []events.File) {
	e := l.entry(x)
	if e.state == committed || e.state == gone {
		return
	}
	for _, f := range files {
		if f.From == (Ref{}) || f.From == x {
			continue
		}
		if e.from == nil {
			e.from = map[Object]bool{}
		}
		e.from[Object{f.From, f.Name}] = true
		add(l.users, f.From, x)
	}
}

// move changes the state of a checkpoint. The save that made it is no longer open then.
func (l *Ledger) move(x Ref, to state) {
	e := l.entry(x)
	e.state = to
	bases := e.bases
	e.bases = nil
	for _, base := range bases {
		remove(l.saves, base, x)
		l.forget(base)
	}
	l.forget(x)
}

// forget drops the files of a checkpoint that is gone and is a base of no open save.
func (l *Ledger) forget(x Ref) {
	e := l.checkpoints[x]
	if e == nil || e.state != gone || len(l.saves[x]) > 0 {
		return
	}
	for o := range e.from {
		remove(l.users, o.Of, x)
	}
	e.from = nil
}

func add(to map[Ref]map[Ref]bool, key, of Ref) {
	if to[key] == nil {
		to[key] = map[Ref]bool{}
	}
	to[key][of] = true
}

func remove(from map[Ref]map[Ref]bool, key, of Ref) {
	delete(from[key], of)
	if len(from[key]) == 0 {
		delete(from, key)
	}
}

// Suppose changes the ledger as the deletion of a checkpoint would, for a caller that only asks
// what would be.
func (l *Ledger) Suppose(x Ref) {
	if l.entry(x).state != unknown {
		l.move(x, gone)
	}
}

// Bases returns the checkpoints whose objects an open save may name: those in its
// checkpoint.begun that were committed and not gone at that position.
func (l *Ledger) Bases(save Ref) []Ref {
	if e := l.checkpoints[save]; e != nil {
		return slices.Clone(e.bases)
	}
	return nil
}

// Gone reports whether a checkpoint was deleted or aborted.
func (l *Ledger) Gone(x Ref) bool {
	e := l.checkpoints[x]
	return e != nil && e.state == gone
}

// Kept is the reason why objects of a checkpoint that is gone must stay.
type Kept struct {
	All   bool     // every object must stay: an open save may name it
	Names []string // of the objects that must stay, sorted
	By    []Ref    // checkpoints that name them, and open saves that may, sorted
}

// Keeps reports whether the object with a name must stay.
func (k Kept) Keeps(name string) bool {
	_, found := slices.BinarySearch(k.Names, name)
	return k.All || found
}

// Kept returns the objects of a checkpoint that must stay although it is gone. Of a checkpoint
// that is not gone, all stay.
func (l *Ledger) Kept(x Ref) Kept {
	if !l.Gone(x) {
		return Kept{All: true}
	}
	names, by := map[string]bool{}, map[Ref]bool{}
	for y := range l.users[x] {
		e := l.checkpoints[y]
		if e.state != committed && len(l.saves[y]) == 0 {
			continue
		}
		for o := range e.from {
			if o.Of == x {
				names[o.Name] = true
			}
		}
		if e.state == committed {
			by[y] = true
		}
		maps.Copy(by, l.saves[y])
	}
	maps.Copy(by, l.saves[x])
	return Kept{All: len(l.saves[x]) > 0, Names: slices.Sorted(maps.Keys(names)), By: slices.SortedFunc(maps.Keys(by), compare)}
}

func compare(a, b Ref) int {
	return cmp.Or(cmp.Compare(a.Run, b.Run), cmp.Compare(a.Trial, b.Trial), cmp.Compare(a.Checkpoint, b.Checkpoint))
}
