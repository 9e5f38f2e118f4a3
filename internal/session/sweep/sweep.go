// Package sweep removes the files of aborted saves of a group on several nodes, and nothing under
// a node that still writes.
package sweep

import (
	"maps"
	"slices"
	"sync"
)

// Writers tracks which nodes may still write files of aborted saves. The files are removed in the
// background, since a disk may be slow. The methods may be called concurrently.
type Writers struct {
	removing sync.WaitGroup

	mu      sync.Mutex
	nodes   map[int]bool            // of the group, without this one and those that are lost
	settled map[string]map[int]bool // by checkpoint: nodes that write no more of it
	sweeps  map[string]func()       // by checkpoint: to call once all have settled
}

// Expect starts the tracking of the nodes that may write files.
func (w *Writers) Expect(nodes ...int) {
	w.nodes, w.settled, w.sweeps = map[int]bool{}, map[string]map[int]bool{}, map[string]func(){}
	for _, node := range nodes {
		w.nodes[node] = true
	}
}

// Abort records that a save is aborted: sweep, which removes its files, is called once no node
// writes to them.
func (w *Writers) Abort(checkpoint string, sweep func()) {
	w.change(func() { w.sweeps[checkpoint] = sweep })
}

// change changes the state, and then has the files of the saves removed that no node
// writes to.
func (w *Writers) change(with func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	with()
	var due []func()
	for checkpoint, sweep := range w.sweeps {
		writes := func(node int) bool { return !w.settled[checkpoint][node] }
		if slices.ContainsFunc(slices.Collect(maps.Keys(w.nodes)), writes) {
			continue
		}
		delete(w.sweeps, checkpoint)
		delete(w.settled, checkpoint)
		due = append(due, sweep)
	}
	if len(due) > 0 {
		w.removing.Go(func() {
			for _, sweep := range due {
				sweep()
			}
		})
	}
}

// Settle records that a node writes no more files of a save.
func (w *Writers) Settle(node int, checkpoint string) {
	w.change(func() {
		if w.settled[checkpoint] == nil {
			w.settled[checkpoint] = map[int]bool{}
		}
		w.settled[checkpoint][node] = true
	})
}

// Lose records that a node is lost, which writes no more.
func (w *Writers) Lose(node int) { w.change(func() { delete(w.nodes, node) }) }

// Close removes what is left, when no node writes any more, and waits for all removals.
func (w *Writers) Close() {
	w.change(func() { clear(w.nodes) })
	w.removing.Wait()
}
