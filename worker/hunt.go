package worker

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"sync"

	"github.com/ckptstore/ckptstore/worker/client"
)

// proc is a line of the system's table of processes.
type proc struct {
	pid, parent, group, session int

	start uint64 // in clock ticks after boot: with pid, it names one process for ever
	gone  bool   // it has ended and only waits for its parent
}

// readProc reads one line of the table. It fails when there is no such process.
func readProc(pid int) (proc, error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return proc{}, err
	}
	// The name in parentheses may hold anything; the other fields follow it.
	f := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	const state, parent, group, session, threads, start = 0, 1, 2, 3, 17, 19
	if len(f) <= start {
		return proc{}, fmt.Errorf("/proc/%d/stat has %d fields: %q", pid, len(f), stat)
	}
	p := proc{pid: pid}
	for i, to := range map[int]*int{parent: &p.parent, group: &p.group, session: &p.session} {
		if *to, err = strconv.Atoi(string(f[i])); err != nil {
			return proc{}, fmt.Errorf("/proc/%d/stat: %w", pid, err)
		}
	}
	if p.start, err = strconv.ParseUint(string(f[start]), 10, 64); err != nil {
		return proc{}, fmt.Errorf("/proc/%d/stat: %w", pid, err)
	}
	// A main thread can end before the others do: then the process lives.
	p.gone = bytes.ContainsAny(f[state], "ZX") && len(f[threads]) == 1 && f[threads][0] <= '1'
	return p, nil
}

// processes is the system's table of processes.
func processes() (map[int]proc, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	all := map[int]proc{}
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			if p, err := readProc(pid); err == nil { // else it has just ended
				all[pid] = p
			}
		}
	}
	return all, nil
}

// hunt finds the processes of jobs. A process belongs to one when
//
//   - its environment carries a job's marker,
//   - it is a rank, or was found by an earlier look,
//   - it is in a process group or session that one of these leads or led, or
//   - its parent belongs to the job.
//
// So a process that overwrites or clears its environment is found, and one
// that leaves its group or session is found. Not found is a process that did
// all of this between two looks: cleared its environment, left for a group
// and session that no known process has led, and lost its parent. Nor is
// another user's, which could not be killed either.
type hunt struct {
	markers [][]byte

	mu       sync.Mutex
	known    map[int]proc // by PID, as it was when first seen
	groups   map[int]proc // those that led a group, by its number
	sessions map[int]proc // those that led a session, by its number
	spared   map[int]proc // another user's
}

func newHunt(jobs ...string) *hunt {
	h := &hunt{}
	for _, job := range jobs {
		h.markers = append(h.markers, []byte(client.EnvJob+"="+job))
	}
	h.forget()
	return h
}

// forget forgets all processes, because none of them is left.
func (h *hunt) forget() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.known, h.groups, h.sessions, h.spared = map[int]proc{}, map[int]proc{}, map[int]proc{}, map[int]proc{}
}

// add makes a process known.
func (h *hunt) add(p proc) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.addLocked(p)
}

func (h *hunt) addLocked(p proc) {
	h.known[p.pid] = p
	if p.group == p.pid {
		h.groups[p.pid] = p
	}
	if p.session == p.pid {
		h.sessions[p.pid] = p
	}
}

// spare leaves a process alone from now on.
func (h *hunt) spare(p proc) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.spared[p.pid] = p
}

// look finds the live processes of the jobs, and remembers them.
func (h *hunt) look() ([]proc, error) {
	all, err := processes()
	if err != nil {
		return nil, err
	}
	// Who looks, and what it runs under, may have inherited a marker.
	for pid := os.Getpid(); pid > 0; {
		p, ok := all[pid]
		delete(all, pid)
		if pid = p.parent; !ok {
			break
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	var found []proc
	ours := map[int]bool{}
	take := func(is func(proc) bool) (more bool) {
		for pid, p := range all {
			if p.gone || ours[pid] || h.spared[pid].start == p.start || !is(p) {
				continue
			}
			ours[pid], more = true, true
			found = append(found, p)
			h.addLocked(p)
		}
		return more
	}
	take(func(p proc) bool { return h.carries(p.pid) })
	for take(func(p proc) bool { return ours[p.parent] || h.belongs(p, all) }) { // up to the last generation
	}
	return found, nil
}

// belongs reports whether p is known, or in a group or session of one known.
// The number of a group is nobody else's while anyone is in it, and may be
// reused later: by another leader, or in another session. What is left to
// chance is a reuse in the same session by a leader that has ended.
func (h *hunt) belongs(p proc, all map[int]proc) bool {
	if k, ok := h.known[p.pid]; ok && k.start == p.start {
		return true
	}
	led := func(leaders map[int]proc, number int) (proc, bool) {
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

// carries reports whether the environment of pid has a marker. A process that
// is gone, a zombie, or another user's does not.
func (h *hunt) carries(pid int) bool {
	env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
	if err != nil {
		return false
	}
	for v := range bytes.SplitSeq(env, []byte{0}) {
		for _, marker := range h.markers {
			if bytes.Equal(v, marker) {
				return true
			}
		}
	}
	return false
}
