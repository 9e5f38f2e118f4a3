package restore

import (
	"context"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/session/staging"
)

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
