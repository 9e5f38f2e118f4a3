package restore

import (
	"context"
	"slices"
	"strings"
	"sync"
)

// ahead is the copying of slots from another node before a rank asks for their checkpoint. It runs while
// the workers start and import modules, and yields to them: where they need all cores, it is done when they
// ask. The load that needs the slots waits for it, and compares their bytes with the committed ones as always.
type ahead struct {
	checkpoint string // ID
	ranks      []int  // that lacked their slot here
	hurry      func() // a load waits
	stop       context.CancelFunc
	done       chan struct{}
	cut        bool // it was stopped; set when done is closed
}

// FetchAhead begins to copy the slots that this node's ranks saved for the checkpoint to resume from,
// unless they are here. It ends with the attempt. If called at all, it is called before the first load,
// and only if the ranks will need their own former parts: see [Config].
func (l *Loader) FetchAhead() {
	resume := l.cfg.Resume
	if resume == "" || IsPath(resume) || strings.Contains(resume, "@") || l.cfg.Fetch == nil {
		return // another trial's slots are not here
	}
	held, release := l.cfg.Arenas.Hold(resume)
	release()
	lacks := slices.DeleteFunc(slices.Clone(l.cfg.Local), func(rank int) bool { return held[rank] != nil })
	if len(lacks) == 0 {
		return
	}
	ctx, stop := context.WithCancel(l.cfg.Work)
	hurry := make(chan struct{})
	a := &ahead{checkpoint: resume, ranks: lacks, hurry: sync.OnceFunc(func() { close(hurry) }), stop: stop, done: make(chan struct{})}
	l.ahead = a
	l.running.Go(func() {
		defer stop()
		l.cfg.Fetch(ctx, resume, lacks, hurry)
		a.cut = ctx.Err() != nil
		close(a.done)
	})
}

// end stops the copying. Its threads leave their low priority, so that it ends at once.
func (a *ahead) end() {
	a.stop()
	a.hurry()
}

// fetched returns the ranks whose slots must still be fetched for a load: it waits for a copying that has
// begun. What that did not bring is not tried again, as its bound has passed, and the files have the same
// bytes. A copying that the load does not need ends.
func (l *Loader) fetched(ctx context.Context, checkpoint string, lacks []int) []int {
	a := l.ahead
	if a == nil {
		return lacks
	}
	tried := func(rank int) bool { return slices.Contains(a.ranks, rank) }
	if a.checkpoint != checkpoint || !slices.ContainsFunc(lacks, tried) {
		a.end()
		return lacks
	}
	a.hurry()
	select {
	case <-a.done:
	case <-ctx.Done():
		return nil
	}
	if a.cut {
		return lacks
	}
	return slices.DeleteFunc(lacks, tried)
}

// EndAhead ends what begins before the first load, so that a save can use its memory: the verification of
// slots and the copying of others.
func (l *Loader) EndAhead(ctx context.Context) error {
	if a := l.ahead; a != nil {
		a.end()
		select {
		case <-a.done:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return l.EndProof(ctx)
}
