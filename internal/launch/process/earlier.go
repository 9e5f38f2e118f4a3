package process

import (
	"context"
	"log/slog"
)

// ReapEarlier kills the processes of earlier jobs that outlived their trainers: those
// that are marked with one of the jobs and have all variables of env, NAME=value,
// in their environment. It returns when none is left.
func ReapEarlier(ctx context.Context, log *slog.Logger, jobs []string, env ...string) error {
	return NewHunt(jobs...).Of(env...).Orphans(ctx, log).Kill(ctx)
}
