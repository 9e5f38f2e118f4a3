package nodes

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/ckptstore/ckptstore/internal/problem"
)

// maxIndex bounds the index that an agent may declare.
const maxIndex = 1 << 20

// maxGone bounds the sessions, and the keys, of nodes that are gone and that a roster remembers. A job has as many
// only if an agent joins again and again, each time with another name.
const maxGone = 1 << 12

// roster is the state machine of membership. It reads no clock and does no I/O: every
// operation gets the time, and appends events to out.
//
//	        join                activate
//	(none) ──────▶ ready/spare ──────────▶ active
//	                    ▲                    │
//	                    └────── release ─────┘
//
// Each live entry may also be suspect. An entry whose agent is silent for T is lost. It
// remains until its key joins again, another key takes its index, or its group is
// released.
type roster struct {
	timeout time.Duration // T
	max     int           // nodes of a group
	aside   int           // index of the standby that coordinates; -1: the coordinator takes ranks
	admits  bool          // groups are made of admitted nodes only

	entries  map[int]*entry    // by index
	sessions map[string]*entry // of the entries
	ended    map[string]string // sessions that are gone, and why
	kept     map[string]int    // the index of each key
	known    map[string]bool   // keys that joined before
	excluded []Excluded        // machines that cannot join
	outcasts map[string]string // sessions of excluded nodes, and why

	ticked time.Time // the last tick
	steady time.Time // the first tick since which all ticks were in time

	joins uint64 // joinings so far
	had   []int  // indexes of the nodes that had the places last, by place; -1: none had

	out []Event
}

// entry is one node, as one agent process declared it.
type entry struct {
	node     Node // Index is the assigned one
	session  string
	joining  uint64
	self     bool // the coordinator's own node: it does not beat
	admitted bool
	active   bool
	place    int    // see [Member.Place]
	suspect  string // why, or empty
	lost     string // why, or empty
	expelled string // why, or empty
	beaten   time.Time
	since    time.Time // it has been a member without a doubt
	open     int       // connections
}

func newRoster(timeout time.Duration, limit int, now time.Time) *roster {
	return &roster{
		timeout: timeout, max: limit, aside: -1, ticked: now, steady: now,
		entries: map[int]*entry{}, sessions: map[string]*entry{}, ended: map[string]string{},
		kept: map[string]int{}, known: map[string]bool{}, outcasts: map[string]string{},
	}
}

// interval is the time between two beats, and between two ticks.
func (r *roster) interval() time.Duration { return r.timeout / 10 }

// patience is the silence after which a node is suspect.
func (r *roster) patience() time.Duration { return 3 * r.interval() }

func (r *roster) emit(e Event) { r.out = append(r.out, e) }

// join adds a node, or replaces the entry of its key. A repeated join of one session
// returns the same entry. A Conflict may end by itself: a node that has died is lost
// after T.
func (r *roster) join(now time.Time, n Node, session string) (*entry, error) {
	if err := r.barred(n); err != nil {
		return nil, err
	}
	if e := r.sessions[session]; e != nil {
		if e.lost == "" && e.expelled == "" {
			e.beaten = now
			return e, nil
		}
		return nil, r.gone(session)
	}
	if _, ok := r.ended[session]; ok {
		return nil, r.gone(session)
	}
	if n.Key == "" || n.Index < -1 || n.Index >= maxIndex {
		return nil, problem.Errorf(problem.Invalid, "join: node %s: key %q, index %d; declare a key, and an index from 0 to %d or -1", n.describe(), n.Key, n.Index, maxIndex-1)
	}
	old := r.entryOf(n.Key)
	if old != nil && !r.superseded(now, old, n) {
		return nil, problem.Errorf(problem.Conflict, "join: two live nodes have the key %q: %s and %s; end one of them, or give each node its own index",
			n.Key, old.node.describe(), n.describe())
	}
	index, err := r.assign(n)
	if err != nil {
		return nil, err
	}
	r.joins++
	e := &entry{node: n, session: session, joining: r.joins, place: -1, beaten: now, since: now}
	e.node.Index = index
	if old != nil {
		e.place = old.place
		r.drop(old, fmt.Sprintf("replaced by %s", n.describe()))
	}
	if holder := r.entries[index]; holder != nil { // lost
		e.place = holder.place
		r.drop(holder, fmt.Sprintf("lost, and replaced by %s", n.describe()))
	}
	for key, kept := range r.kept {
		if kept == index && key != n.Key {
			delete(r.kept, key)
		}
	}
	r.kept[n.Key] = index
	r.entries[index], r.sessions[session] = e, e
	again := r.known[n.Key]
	r.known[n.Key] = true
	r.forget()
	member := r.member(now, e, r.needed())
	if again {
		r.emit(Rejoined{member})
	} else {
		r.emit(Joined{member})
	}
	return e, nil
}

// superseded reports whether a new agent n proves that the agent of old, of the same
// key, has ended.
func (r *roster) superseded(now time.Time, old *entry, n Node) bool {
	switch {
	case old.lost != "":
		return true
	case old.self, old.node.elsewhere(n):
		// A node that is cut off may run its group until T is over.
		return false
	case old.expelled != "": // it may beat still, and have processes
		return now.Sub(old.beaten) >= r.timeout
	}
	// The processes of the old agent ended with its container, or the new agent has ended them before it joined.
	return old.suspect != "" || now.Sub(old.beaten) >= r.patience()
}

// elsewhere reports whether an agent with the same key may run where it cannot end the processes of n. A host name
// proves nothing: a pod that replaces another one has its name, also on another machine, and the other may be
// cut off, or about to end. So another boot ID does not prove that the machine was booted again, and no boot ID
// proves nothing.
func (n Node) elsewhere(other Node) bool {
	same := func(a, b string) bool { return a == b && a != "" }
	return n.Host != other.Host || !same(n.Boot, other.Boot) || !same(n.Net, other.Net)
}

// assign returns the index of a node that joins.
func (r *roster) assign(n Node) (int, error) {
	kept, ok := r.kept[n.Key]
	switch {
	case n.Index >= 0 && ok && kept != n.Index:
		return 0, problem.Errorf(problem.Conflict, "join: node %s: the key %q has index %d in this run and cannot take index %d; keep its index",
			n.describe(), n.Key, kept, n.Index)
	case n.Index >= 0:
		if holder := r.entries[n.Index]; holder != nil && holder.lost == "" && holder.node.Key != n.Key {
			return 0, problem.Errorf(problem.Conflict, "join: two live nodes have the index %d: %s and %s; give each node its own index",
				n.Index, holder.node.describe(), n.describe())
		}
		return n.Index, nil
	case ok:
		return kept, nil
	}
	for index := 0; ; index++ {
		if holder := r.entries[index]; holder == nil || holder.lost != "" {
			return index, nil
		}
	}
}

// entryOf returns the entry of a key, nil if there is none.
func (r *roster) entryOf(key string) *entry {
	if index, ok := r.kept[key]; ok {
		if e := r.entries[index]; e != nil && e.node.Key == key {
			return e
		}
	}
	return nil
}

// drop removes an entry. Its session gets why.
func (r *roster) drop(e *entry, why string) {
	delete(r.entries, e.node.Index)
	if e.session != "" {
		delete(r.sessions, e.session)
		r.ended[e.session] = why
	}
}

// forget forgets what is gone beyond the bound: its key counts as new, and its session as unknown.
func (r *roster) forget() {
	for key := range r.known {
		if len(r.known) <= maxGone+len(r.entries) {
			break
		}
		if r.entryOf(key) == nil {
			delete(r.known, key)
			delete(r.kept, key)
		}
	}
	for session := range r.ended {
		if len(r.ended) <= maxGone {
			break
		}
		delete(r.ended, session)
	}
}

// gone returns the error for a session that has ended: of kind Failed if its node is excluded.
func (r *roster) gone(session string) error {
	if why, ok := r.outcasts[session]; ok {
		return expulsion(why)
	}
	why, ok := r.ended[session]
	if e := r.sessions[session]; e != nil && (e.lost != "" || e.expelled != "") {
		why, ok = cmp.Or(e.expelled, e.lost), true
	}
	if !ok {
		why = "the coordinator does not know this agent"
	}
	return problem.Errorf(problem.Gone, "this node is no member: %s; end its group and join again", why)
}

// hear notes a request of a session. It returns the error of gone unless the session is live.
func (r *roster) hear(now time.Time, session string) (*entry, error) {
	e := r.sessions[session]
	if e == nil || e.lost != "" || e.expelled != "" {
		return nil, r.gone(session)
	}
	e.beaten = now
	if e.suspect != "" {
		e.suspect, e.since = "", now
		r.emit(Recovered{e.node.Index})
	}
	return e, nil
}

// connect and disconnect count the open connections of a session. Without any, the node
// is suspect.
func (r *roster) connect(session string) {
	if e := r.sessions[session]; e != nil {
		e.open++
	}
}

func (r *roster) disconnect(session string) {
	e := r.sessions[session]
	if e == nil {
		return
	}
	if e.open--; e.open <= 0 {
		e.open = 0
		r.doubt(e, "its connections are closed")
	}
}

func (r *roster) doubt(e *entry, why string) {
	if e.suspect == "" && e.lost == "" {
		e.suspect = why
		r.emit(Suspect{e.node.Index, why})
	}
}

// tick judges all nodes. It is called each T/10. If a call is late by more than that, the
// coordinator was paused: requests may be waiting that it did not read yet. Then it judges
// no node until it has ticked in time for T.
func (r *roster) tick(now time.Time) {
	if late := now.Sub(r.ticked) - r.interval(); late > r.interval() {
		r.steady = now
		r.emit(Paused{late})
	}
	r.ticked = now
	watched := now.Sub(r.steady)
	for _, e := range r.ordered() {
		silence := now.Sub(e.beaten)
		switch {
		case e.self, e.lost != "":
		case silence >= r.timeout && watched >= r.timeout:
			e.lost = cmp.Or(e.expelled, fmt.Sprintf("nothing was received for %v", silence.Round(time.Millisecond)))
			e.suspect = ""
			r.emit(Lost{e.node.Index, e.joining, e.lost})
		case silence >= r.patience() && watched >= r.patience():
			r.doubt(e, "it misses beats")
		}
	}
}

// leave removes the entry of a session.
func (r *roster) leave(session, reason string) {
	if e := r.sessions[session]; e != nil {
		r.drop(e, "it left: "+reason)
		r.emit(Left{e.node.Index, e.joining, reason})
	}
}

// expel refuses the agent of a node from now on. As for a silent one, its workers live
// until T/2 has passed since its last answered beat, so the node is lost after T.
func (r *roster) expel(index int, joining uint64, why string) error {
	e := r.entries[index]
	if e == nil || e.self || e.lost != "" || e.joining != joining {
		return problem.Errorf(problem.NotFound, "expel node %d: no other live node has this index", index)
	}
	e.expelled = why
	r.doubt(e, why)
	return nil
}

// admit lets groups have a node.
func (r *roster) admit(now time.Time, index int, joining uint64) {
	if e := r.entries[index]; e != nil && e.joining == joining && !e.admitted {
		e.admitted, e.since = true, now
	}
}

// opening reports whether no group can have a node yet.
func (r *roster) opening(e *entry) bool { return r.admits && !e.admitted && !e.self }

// choose returns the nodes of the next group with their places, ordered by place. Nodes
// keep their places, and spares fill the gaps, so that a replaced node moves no other.
// The places of active nodes are not free.
func (r *roster) choose() []chosen {
	var free, rest []*entry
	taken, used := map[int]*entry{}, map[int]bool{}
	for _, e := range r.entries {
		if e.active && e.lost == "" {
			used[e.place] = true
		}
	}
	open := func(place int) bool { return place >= 0 && place < r.max && !used[place] && taken[place] == nil }
	for _, e := range r.ordered() {
		switch {
		case e.lost != "" || e.suspect != "" || e.active || e.node.Standby || r.opening(e):
		case open(e.place):
			taken[e.place] = e
		default:
			free = append(free, e)
		}
	}
	for _, e := range free {
		if place := r.placeOf(e.node.Index); open(place) {
			taken[place] = e
		} else {
			rest = append(rest, e)
		}
	}
	for place := 0; place < r.max && len(rest) > 0; place++ {
		if open(place) {
			taken[place], rest = rest[0], rest[1:]
		}
	}
	group := make([]chosen, 0, len(taken))
	for _, place := range slices.Sorted(maps.Keys(taken)) {
		group = append(group, chosen{taken[place], place})
	}
	return group
}

// placeOf returns the place that a node has at first, and indexAt the index of the node that has a
// place at first.
func (r *roster) placeOf(index int) int {
	if r.aside >= 0 && index > r.aside {
		return index - 1
	}
	return index
}

func (r *roster) indexAt(place int) int {
	if r.aside >= 0 && place >= r.aside {
		return place + 1
	}
	return place
}

// growth returns how many nodes more than the running group the next one would have, and for
// how long all of these have been members without a doubt. While a node of the group is suspect or
// lost there are none.
func (r *roster) growth(now time.Time) (more int, settled time.Duration) {
	running := false
	for _, e := range r.entries {
		if e.active && (e.lost != "" || e.suspect != "") {
			return 0, 0
		}
		running = running || e.active
	}
	if !running {
		return 0, 0
	}
	group := r.choose()
	for i, c := range group {
		if of := now.Sub(c.since); i == 0 || of < settled {
			settled = of
		}
	}
	return len(group), settled
}

type chosen struct {
	*entry
	place int
}

// activate makes a choice a group.
func (r *roster) activate(group []chosen) {
	for _, c := range group {
		for _, e := range r.entries {
			if e.place == c.place {
				e.place = -1 // its owner was replaced
			}
		}
		c.active, c.entry.place = true, c.place
		r.holds(c.place, c.node.Index)
	}
}

// holds notes which node has a place.
func (r *roster) holds(place, index int) {
	for place >= 0 && place < r.max && len(r.had) <= place {
		r.had = append(r.had, -1)
	}
	if place >= 0 && place < len(r.had) {
		r.had[place] = index
	}
}

// lastAt returns the index of the node that had a place last, or of the node that has it at first.
func (r *roster) lastAt(place int) int {
	if place < len(r.had) && r.had[place] >= 0 {
		return r.had[place]
	}
	return r.indexAt(place)
}

// release ends the membership of nodes in a group. Lost nodes are removed.
func (r *roster) release(nodes []int) {
	for _, index := range nodes {
		e := r.entries[index]
		switch {
		case e == nil:
		case e.lost != "":
			r.drop(e, e.lost)
		default:
			e.active = false
		}
	}
}

func (r *roster) ordered() []*entry {
	return slices.SortedFunc(maps.Values(r.entries), func(a, b *entry) int { return cmp.Compare(a.node.Index, b.node.Index) })
}

// members returns all nodes, ordered by index.
func (r *roster) members(now time.Time) []Member {
	list, needed := make([]Member, 0, len(r.entries)), r.needed()
	for _, e := range r.ordered() {
		list = append(list, r.member(now, e, needed))
	}
	return list
}

func (r *roster) member(now time.Time, e *entry, needed map[*entry]bool) Member {
	m := Member{Node: e.node, Joining: e.joining, Place: e.place, Why: cmp.Or(e.lost, e.suspect)}
	if !e.self {
		m.Silence = now.Sub(e.beaten)
	}
	switch {
	case e.lost != "":
		m.State = StateLost
	case e.suspect != "":
		m.State = StateSuspect
	case e.active:
		m.State = StateActive
	case r.opening(e):
		m.State = StateOpening
	case !needed[e]:
		m.State = StateSpare
	default:
		m.State = StateReady
	}
	return m
}

// needed returns the nodes that the next group needs: none while a group is running.
func (r *roster) needed() map[*entry]bool {
	needed := map[*entry]bool{}
	for _, e := range r.entries {
		if e.active {
			return nil
		}
	}
	for _, c := range r.choose() {
		needed[c.entry] = true
	}
	return needed
}

// describe names a node for people.
func (n Node) describe() string { return fmt.Sprintf("%s (process %d)", cmp.Or(n.Host, "?"), n.PID) }
