package restore

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/session/staging"
	"github.com/ckptstore/ckptstore/projections"
)

// reader reads the checkpoint that a reference names. One that lies at a path
// has that path for its ID.
func (l *Loader) reader(ctx context.Context, ref string) (data.Reader, projections.Checkpoint, error) {
	if IsPath(ref) {
		f, err := l.cfg.Store.Foreign(ctx, ref)
		if err != nil {
			return nil, projections.Checkpoint{}, err
		}
		return f, projections.Checkpoint{ID: f.Path(), Step: -1}, nil
	}
	c, err := l.cfg.Store.Resolve(ctx, Qualify(l.cfg.Run, ref))
	if err != nil {
		return nil, c, err
	}
	digest, err := checkpoint.ParseDigest(c.Manifest)
	if err != nil {
		return nil, c, fmt.Errorf("checkpoint %s: %w", c.ID, err)
	}
	return l.cfg.Store.Reader(l.cfg.Store.Data.Reader(checkpoint.RefOf(c.Run, c.Trial, c.ID)).WithManifest(digest)), c, nil
}

// from names the trial that a load reads from, if that is another than the group's
// own: the IDs of two trials may be the same.
func (r *restore) from() string {
	if cfg := r.l.cfg; r.ckpt.Run == "" || r.ckpt.Run == cfg.Run && r.ckpt.Trial == cfg.Trial {
		return ""
	}
	return r.ckpt.Run + "/" + r.ckpt.Trial
}

// unreadable says what to do about a checkpoint that is damaged or gone: the
// next attempt would resume from it too.
func unreadable(c projections.Checkpoint, err error) error {
	if c.Run == "" || !errors.As(err, new(*data.CorruptError)) && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return fmt.Errorf("%w; `ckptstore ls %s` lists the others: end the job and start it with --resume %s@ID of an intact one", err, c.Run, c.Run)
}

// hold is what the slots of this node still have of a checkpoint of this trial.
func (r *restore) hold() (held staging.Copies, release func()) {
	if r.ckpt.Run != r.l.cfg.Run || r.ckpt.Trial != r.l.cfg.Trial {
		return nil, func() {}
	}
	return r.l.cfg.Arenas.Hold(r.ckpt.ID)
}

// fromSlots reads what is in slots. It is the same checkpoint, digest by
// digest, or is not used: the rest is in the files.
func (r *restore) fromSlots(ctx context.Context, held staging.Copies, wants []checkpoint.Want, reads []checkpoint.Read, dst loadTarget) (n int64, rest []checkpoint.Read, err error) {
	files, ok := r.reader.(*data.FileReader)
	if !ok || len(held) == 0 {
		return 0, reads, nil
	}
	got, err := files.ReadMemory(ctx, wants, reads, dst, held)
	if len(got.Unfit) > 0 {
		r.l.cfg.Logger.Warn("shared memory does not hold what was committed, and the files are read instead",
			"checkpoint", r.ckpt.ID, "chunks", len(got.Unfit), "first", got.Unfit[0])
	}
	return got.Bytes, got.Rest, err
}

// The tiers of a restore.
const (
	tierSlots = "slots"
	tierFiles = "files"
)

// tierOf says where the bytes of a restore came from.
func tierOf(slots, files int64) string {
	switch {
	case slots == 0:
		return tierFiles
	case files == 0:
		return tierSlots
	}
	return tierSlots + "+" + tierFiles
}

// Load takes part in the next load of a rank with the ranks that load, which are
// distinct and ascending, and returns the reply to it. It waits for the others for
// as long as limit. lends says that the rank can read several files.
func (l *Loader) Load(ctx context.Context, rank int, ranks []int, req client.LoadRequest, lends bool, limit time.Duration) (any, error) {
	for _, it := range req.Items {
		if it.FQN == "" {
			return nil, &MisuseError{errors.New("an item has no name")}
		}
	}
	ld, err := l.join(rank, ranks, req, lends)
	if err != nil {
		return nil, err
	}
	wait, cancel := l.bounded(ctx, limit)
	defer cancel()
	select {
	case <-ld.complete:
	case <-wait.Done():
		absent := l.absent(ld)
		l.leave(ld, rank)
		return nil, fmt.Errorf("load %d is a collective, and ranks %v have not called it: %w", ld.n, absent, wait.Err())
	}
	if ld.over != nil {
		return nil, &ConflictError{ld.over}
	}
	select {
	case <-ld.done:
		return l.take(ld, rank)
	case <-ctx.Done():
		l.leave(ld, rank)
		return nil, ctx.Err()
	}
}
