package main

import (
	"context"
	"log/slog"

	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/planner/retention"
)

// keep is the collection that a job does after each commit.
func keep(st *store.Store, run, policy string, log *slog.Logger) (func(context.Context) error, error) {
	p, err := retention.Parse(policy)
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context) error {
		out, err := st.Collect(ctx, store.CollectOptions{Runs: []string{run}, Policy: p, Apply: true})
		for _, c := range out.Checkpoints {
			switch {
			case c.Left != "":
				log.Warn("the files of a deleted checkpoint stay for now", "checkpoint", c.ID, "because", c.Left)
			case c.Action == store.Delete:
				log.Info("checkpoint deleted", "checkpoint", c.ID, "policy", policy, "freed", c.Freed)
			}
		}
		return err
	}, nil
}
