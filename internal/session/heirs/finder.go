package heirs

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
)

// Saves are the open saves as the coordinating process knows them.
type Saves interface {
	// Sealed returns the fingerprint of a rank's plan if the rank has sealed its part and no node has
	// written it.
	Sealed(checkpoint string, rank int) (checkpoint.Digest, bool)
	// Deadline returns when a save is aborted unless it is complete; zero: not known.
	Deadline(checkpoint string) time.Time
}

// Config describes the nodes of an attempt. A node has a place in the attempt and an index in the job.
type Config struct {
	Partners [][]int             // by place: the places of the nodes that keep the slots of a node
	Index    func(place int) int // of the node there
	Limit    time.Duration       // for the partners of a node to answer, while there is another one to ask
	Saves    Saves
	Now      func() time.Time
}

// Finder finds a node for each part of a lost node. Only the goroutine that folds the saves uses it. In a nil one no
// node has copies, and no node may be lost.
type Finder struct {
	cfg      Config
	copies   map[Part]map[int]bool // indexes of the nodes that have a part of an open save, as the log has them
	searches map[Part]*search
	lost     map[int]bool // places
}

// search finds a node that writes a part of a lost node. A node that has not answered in time may still
// write, and is not asked again.
type search struct {
	from  int            // place of the lost node
	why   string         // it is lost
	by    int            // place of the node that was asked last
	until time.Time      // when the next one is asked although by has not answered; zero: never
	asked map[int]string // by place: why a node that was asked does not write; empty: it may
}

// NewFinder returns the finder of an attempt.
func NewFinder(cfg Config) *Finder {
	return &Finder{cfg: cfg, copies: map[Part]map[int]bool{}, searches: map[Part]*search{}, lost: map[int]bool{}}
}

// Copied notes a copy of a node's slots.
func (f *Finder) Copied(b *events.ReplicaNode) {
	if f == nil {
		return
	}
	for _, rank := range events.RanksIn(b.Ranks) {
		of := Part{b.Checkpoint, rank}
		if f.copies[of] == nil {
			f.copies[of] = map[int]bool{}
		}
		f.copies[of][b.Node] = true
	}
}

// End forgets a save that is over.
func (f *Finder) End(checkpoint string) {
	if f == nil {
		return
	}
	maps.DeleteFunc(f.copies, func(of Part, _ map[int]bool) bool { return of.Checkpoint == checkpoint })
	maps.DeleteFunc(f.searches, func(of Part, _ *search) bool { return of.Checkpoint == checkpoint })
}

// Lose takes the loss of the node at a place, with its parts of open saves. It finds nodes for what the
// node has sealed and not written, also for what it was to write for another lost node. The other parts
// cannot be written by any node, nor can parts of a save for which whole is true.
func (f *Finder) Lose(place int, why error, parts []Part, whole func(checkpoint string) bool) (step Step, failed []Part) {
	f.lost[place] = true
	var ask []Part
	for of, search := range f.searches {
		if _, asked := search.asked[place]; asked && (search.by == place || !f.pending(search)) {
			ask = append(ask, of)
		}
	}
	for _, of := range parts {
		if f.searches[of] != nil {
			continue
		}
		search := &search{from: place, by: -1, why: why.Error(), asked: map[int]string{}}
		if _, sealed := f.cfg.Saves.Sealed(of.Checkpoint, of.Rank); !sealed || whole(of.Checkpoint) || len(f.heirs(of, search)) == 0 {
			failed = append(failed, of)
			continue
		}
		f.searches[of] = search
		ask = append(ask, of)
	}
	return f.ask(ask), failed
}

// Heed takes the answer of the node at a place: the next partner is asked for what it does not write.
func (f *Finder) Heed(place int, a Reply) Step {
	var ask []Part
	of := func(rank int) (Part, *search) {
		part := Part{a.Checkpoint, rank}
		search := f.searches[part]
		if search != nil {
			if _, asked := search.asked[place]; asked {
				return part, search
			}
		}
		return part, nil
	}
	for _, rank := range a.Writes {
		if _, search := of(rank); search != nil {
			search.by, search.until = place, time.Time{} // also if the next one was asked
		}
	}
	for _, rank := range a.Without {
		part, search := of(rank)
		if search == nil {
			continue
		}
		if search.asked[place] = cmp.Or(a.Why, "it does not write"); search.by == place || !f.pending(search) {
			ask = append(ask, part)
		}
	}
	return f.ask(ask)
}

// Late asks the next partner where a node has not answered in time. It returns when that is the case
// next; zero: never.
func (f *Finder) Late() (step Step, next time.Time) {
	if f == nil {
		return step, next
	}
	var late []Part
	now := f.cfg.Now()
	for of, search := range f.searches {
		if !search.until.IsZero() && !now.Before(search.until) {
			late = append(late, of)
		}
	}
	step = f.ask(late)
	for _, search := range f.searches {
		if at := search.until; !at.IsZero() && (next.IsZero() || at.Before(next)) {
			next = at
		}
	}
	return step, next
}

// ask orders the next partner to write each part.
func (f *Finder) ask(parts []Part) (step Step) {
	type order struct {
		checkpoint string
		by         int
	}
	given, without := map[order]*Order{}, map[string][]int{}
	for _, of := range parts {
		search := f.searches[of]
		fingerprint, sealed := f.cfg.Saves.Sealed(of.Checkpoint, of.Rank)
		if !sealed { // it is written, or its save is over
			delete(f.searches, of)
			continue
		}
		search.until = time.Time{}
		heirs := f.heirs(of, search)
		if len(heirs) == 0 {
			if !f.pending(search) {
				without[of.Checkpoint] = append(without[of.Checkpoint], of.Rank)
			}
			continue
		}
		by := heirs[0]
		if search.by, search.asked[by] = by, ""; len(heirs) > 1 {
			left := f.cfg.Limit
			if end := f.cfg.Saves.Deadline(of.Checkpoint); !end.IsZero() {
				left = min(left, end.Sub(f.cfg.Now()))
			}
			search.until = f.cfg.Now().Add(left / time.Duration(len(heirs)))
		}
		o := given[order{of.Checkpoint, by}]
		if o == nil {
			o = &Order{Checkpoint: of.Checkpoint, Why: search.why}
			given[order{of.Checkpoint, by}] = o
		}
		if within := search.until.Sub(f.cfg.Now()); !search.until.IsZero() && (o.Within == 0 || within < o.Within) {
			o.Within = max(within, 1) // 0 has no end
		}
		o.Parts = append(o.Parts, OrderedPart{of.Rank, fingerprint})
	}
	first := func(a, b order) int {
		return cmp.Or(cmp.Compare(a.checkpoint, b.checkpoint), cmp.Compare(a.by, b.by))
	}
	for _, to := range slices.SortedFunc(maps.Keys(given), first) {
		o := *given[to]
		slices.SortFunc(o.Parts, func(a, b OrderedPart) int { return cmp.Compare(a.Rank, b.Rank) })
		step.Orders = append(step.Orders, Addressed{to.by, f.cfg.Index(to.by), o})
	}
	for _, id := range slices.Sorted(maps.Keys(without)) {
		ranks := slices.Sorted(slices.Values(without[id]))
		step.Without = append(step.Without, Unwritten{id, ranks, f.unwritten(f.searches[Part{id, ranks[0]}])})
	}
	return step
}

// heirs returns the places of the nodes that can write a part of a lost node, in the order in which they are
// asked: those that live and were not asked. Those whose copies are in the log come first, then the other partners:
// the fact of a copy may be lost with the node. A coordinator that took over may pair the nodes in another way than
// the one before, and then the log alone has the partners.
func (f *Finder) heirs(of Part, l *search) (heirs []int) {
	if l.from >= len(f.cfg.Partners) {
		return nil
	}
	partners, copies := f.cfg.Partners[l.from], f.copies[of]
	for at := range f.cfg.Partners {
		_, again := l.asked[at]
		if at != l.from && !again && !f.lost[at] && (copies[f.cfg.Index(at)] || slices.Contains(partners, at)) {
			heirs = append(heirs, at)
		}
	}
	unknown := func(at int) int {
		if copies[f.cfg.Index(at)] {
			return 0
		}
		return 1
	}
	slices.SortStableFunc(heirs, func(a, b int) int { // then as they are paired
		return cmp.Or(cmp.Compare(unknown(a), unknown(b)), cmp.Compare(uint(slices.Index(partners, a)), uint(slices.Index(partners, b))))
	})
	return heirs
}

// pending reports whether a node that was asked may write a part.
func (f *Finder) pending(l *search) bool {
	for at, why := range l.asked {
		if why == "" && !f.lost[at] {
			return true
		}
	}
	return false
}

// unwritten returns why no partner of a lost node writes a part of it.
func (f *Finder) unwritten(l *search) string {
	var each []string
	for _, at := range slices.Sorted(maps.Keys(l.asked)) {
		if why := l.asked[at]; why != "" {
			each = append(each, fmt.Sprintf("node %d: %s", f.cfg.Index(at), why))
		}
	}
	reason := l.why + "; no other node has a whole replica of its slots"
	if len(each) > 0 {
		reason += ": " + strings.Join(each, "; ")
	}
	return reason
}
