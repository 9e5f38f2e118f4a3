package restore

import (
	"context"

	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/session/staging"
)

// proof is the result of verifying the slots that hold the checkpoint to resume
// from before a rank asks for it. Checksums are compared while the workers start
// and import modules, which takes longer. It holds for slots that have not
// changed since and whose paths no worker has received.
type proof struct {
	checkpoint string
	stop       context.CancelFunc
	done       chan struct{}

	// Set when done is closed.
	slots  map[int]int // by rank: the use that was verified
	chunks *data.Proof
}

// Prove begins to verify the slots that hold the checkpoint to resume from. It
// ends with the attempt. If called at all, it is called before the first load.
func (l *Loader) Prove() {
	resume := l.cfg.Resume
	if resume == "" || IsPath(resume) || l.cfg.Store.Resolve == nil {
		return
	}
	ctx, stop := context.WithCancel(l.cfg.Work)
	p := &proof{checkpoint: resume, stop: stop, done: make(chan struct{})}
	l.proof = p
	l.running.Go(func() {
		defer close(p.done)
		defer stop()
		if err := l.proveAll(ctx, p); err != nil && ctx.Err() == nil {
			l.cfg.Logger.Warn("checkpoint in shared memory not verified ahead of its load", "checkpoint", p.checkpoint, "error", err)
		}
	})
}

func (l *Loader) proveAll(ctx context.Context, p *proof) error {
	reader, c, err := l.cfg.reader(ctx, p.checkpoint)
	if err != nil {
		return err
	}
	files, ok := reader.(*data.FileReader)
	if !ok || c.Run != l.cfg.Run || c.Trial != l.cfg.Trial {
		return nil
	}
	held, release := l.cfg.Arenas.Hold(c.ID)
	defer release()
	idle := held.Idle()
	if len(idle) == 0 {
		return nil
	}
	m, err := files.ReadMetadata(ctx)
	if err != nil {
		return err
	}
	if err := files.SetUp(ctx, m, true); err != nil {
		return err
	}
	if p.chunks, err = files.ProveMemory(ctx, idle); err != nil {
		return err
	}
	p.checkpoint, p.slots = c.ID, idle.Uses()
	return nil
}

// EndProof releases the slots being verified, so that a save before any load can
// use them.
func (l *Loader) EndProof(ctx context.Context) error {
	if l.proof == nil {
		return nil
	}
	l.proof.stop()
	select {
	case <-l.proof.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// proven returns the proof of the slots of a checkpoint. It waits for a running
// verification.
func (l *Loader) proven(ctx context.Context, checkpoint string, idle staging.Copies) (*data.Proof, error) {
	p := l.proof
	if p == nil {
		return nil, nil
	}
	select {
	case <-p.done:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if p.checkpoint != checkpoint {
		return nil, nil
	}
	for rank, use := range idle.Uses() {
		if p.slots[rank] != use {
			return nil, nil
		}
	}
	return p.chunks, nil
}
