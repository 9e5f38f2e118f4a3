package process

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"sync"

	"github.com/ckptstore/ckptstore/client"
)

// Entry is a line of the system's table of processes.
type Entry struct {
	pid, parent, group, session int

	start uint64 // in clock ticks after boot: with pid, it identifies one process forever
	gone  bool   // it has ended and is not reaped yet
}

// PID returns its number, which another process may have by now.
func (p Entry) PID() int { return p.pid }

// Replaced reports whether its number belongs to another process by now.
func (p Entry) Replaced() bool {
	now, err := readEntry(p.pid)
	return err == nil && now.start != p.start
}

// readEntry reads one entry of the table. It fails if there is no such process.
func readEntry(pid int) (Entry, error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return Entry{}, err
	}
	// The name in parentheses may hold anything; the other fields follow it.
	f := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	const state, parent, group, session, threads, start = 0, 1, 2, 3, 17, 19
	if len(f) <= start {
		return Entry{}, fmt.Errorf("/proc/%d/stat has %d fields: %q", pid, len(f), stat)
	}
	p := Entry{pid: pid}
	for i, to := range map[int]*int{parent: &p.parent, group: &p.group, session: &p.session} {
		if *to, err = strconv.Atoi(string(f[i])); err != nil {
			return Entry{}, fmt.Errorf("/proc/%d/stat: %w", pid, err)
		}
	}
	if p.start, err = strconv.ParseUint(string(f[start]), 10, 64); err != nil {
		return Entry{}, fmt.Errorf("/proc/%d/stat: %w", pid, err)
	}
	// A main thread can end before the other threads: then the process is alive.
	p.gone = bytes.ContainsAny(f[state], "ZX") && len(f[threads]) == 1 && f[threads][0] <= '1'
	return p, nil
}

// processes reads the system's table of processes.
func processes() (map[int]Entry, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	all := map[int]Entry{}
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			if p, err := readEntry(pid); err == nil { // otherwise it has just ended
				all[pid] = p
			}
		}
	}
	return all, nil
}

// Hunt finds the processes of jobs. A process belongs to a job if
//
//   - its environment carries a job's marker,
//   - it is a rank, or was found by an earlier Look,
//   - it is in a process group or session that such a process leads or led, or
//   - its parent belongs to the job.
//
// So Hunt finds a process that overwrites or clears its environment, and a
// process that leaves its group or session. It misses a process that does all of
// this between two calls of Look: clears its environment, leaves for a group and
// session that no known process has led, and loses its parent. It also misses
// another user's processes, which the trainer could not kill.
type Hunt struct {
	markers [][]byte
	of      [][]byte // variables that a process with a marker must have too
	// spares decides by its environment whether to spare a process that matches
	// all of these; nil: spare none.
	spares func(pid int, env [][]byte) bool

	mu       sync.Mutex
	known    map[int]Entry // by PID, as first seen
	groups   map[int]Entry // group leaders, by the group's number
	sessions map[int]Entry // session leaders, by the session's number
	spared   map[int]Entry // of another user
	waiting  map[int]Entry // they carry the marker, and have no rank yet

	starting sync.RWMutex // held to start a process that waits, and to look
}

// NewHunt returns a hunt for the processes of jobs.
func NewHunt(jobs ...string) *Hunt {
	h := &Hunt{waiting: map[int]Entry{}}
	for _, job := range jobs {
		h.markers = append(h.markers, []byte(client.EnvJob+"="+job))
	}
	h.Forget()
	return h
}

// Of narrows the hunt to processes whose environment also has these variables, as
// NAME=VALUE. An identity from a log may be that of a job of another store: then
// none of that job's processes is found.
func (h *Hunt) Of(variables ...string) *Hunt {
	for _, v := range variables {
		h.of = append(h.of, []byte(v))
	}
	return h
}

// Forget drops all known processes. Call it when none of them is left.
func (h *Hunt) Forget() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.known, h.groups, h.sessions, h.spared = map[int]Entry{}, map[int]Entry{}, map[int]Entry{}, map[int]Entry{}
}

// Known returns the processes that are or were the jobs', since the last Forget.
func (h *Hunt) Known() []Entry {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Collect(maps.Values(h.known))
}

// Add makes a process known.
func (h *Hunt) Add(p Entry) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.addLocked(p)
}

func (h *Hunt) addLocked(p Entry) {
	h.known[p.pid] = p
	if p.group == p.pid {
		h.groups[p.pid] = p
	}
	if p.session == p.pid {
		h.sessions[p.pid] = p
	}
}

// spare excludes a process from now on.
func (h *Hunt) spare(p Entry) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.spared[p.pid] = p
}

// Look finds the live processes of the jobs, and remembers them.
func (h *Hunt) Look() ([]Entry, error) {
	h.starting.Lock()
	defer h.starting.Unlock()
	all, err := processes()
	if err != nil {
		return nil, err
	}
	// The caller and its parents may have inherited a marker.
	for pid := os.Getpid(); pid > 0; {
		p, ok := all[pid]
		delete(all, pid)
		if pid = p.parent; !ok {
			break
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	var found []Entry
	ours := map[int]bool{}
	take := func(is func(Entry) bool) (more bool) {
		for pid, p := range all {
			if p.gone || ours[pid] || h.spared[pid].start == p.start || h.waiting[pid].start == p.start || !is(p) {
				continue
			}
			ours[pid], more = true, true
			found = append(found, p)
			h.addLocked(p)
		}
		return more
	}
	take(func(p Entry) bool { return h.carries(p.pid) })
	for take(func(p Entry) bool { return ours[p.parent] || h.belongs(p, all) }) { // up to the last generation
	}
	return found, nil
}

// belongs reports whether p is known, or in the group or session of a known
// process. The number of a group is not reused while the group has a process.
// Later it may be reused, by another leader or in another session. Only a reuse
// in the same session by a leader that has ended is mistaken.
func (h *Hunt) belongs(p Entry, all map[int]Entry) bool {
	if k, ok := h.known[p.pid]; ok && k.start == p.start {
		return true
	}
	led := func(leaders map[int]Entry, number int) (Entry, bool) {
		leader, ok := leaders[number]
		now, alive := all[number]
		return leader, ok && (!alive || now.start == leader.start)
	}
	if leader, ok := led(h.groups, p.group); ok && (leader.session == p.session || p.session == leader.pid) {
		return true
	}
	_, ok := led(h.sessions, p.session)
	return ok
}

// carries reports whether the environment of pid has a marker. It returns false
// for a process that is gone, a zombie, or another user's.
func (h *Hunt) carries(pid int) bool {
	env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
	if err != nil {
		return false
	}
	marked, of := false, 0
	all := bytes.Split(env, []byte{0})
	for _, v := range all {
		is := func(marker []byte) bool { return bytes.Equal(v, marker) }
		marked = marked || slices.ContainsFunc(h.markers, is)
		if slices.ContainsFunc(h.of, is) {
			of++
		}
	}
	return marked && of >= len(h.of) && (h.spares == nil || !h.spares(pid, all))
}
