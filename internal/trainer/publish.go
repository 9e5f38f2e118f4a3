package trainer

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"time"

	"github.com/ckptstore/ckptstore/internal/container"
	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store"
)

// lastCommit is the annotation of a pod for the newest commit of its run. A scheduler that
// has to preempt a pod can choose the pod that loses least.
const lastCommit = "ckptstore/last-commit"

// commit is the value of the annotation.
type commit struct {
	Run        string    `json:"run"`
	Checkpoint string    `json:"checkpoint"` // ID
	Step       int64     `json:"step"`
	Time       time.Time `json:"time"`
}

// publish returns a function that sets the annotation of this pod to the newest commit of a
// run.
func publish(st *store.Store, run, pod string) (func(context.Context) error, error) {
	p, err := container.ThisPod(pod, os.Getenv)
	if err != nil {
		return nil, fmt.Errorf("%w: --annotate-pod %s: %w", launch.ErrConfig, pod, err)
	}
	return func(ctx context.Context) error {
		c, err := query.Ask(ctx, st.Views(), query.Resolve, query.Params{Ref: run})
		if err != nil {
			return err
		}
		text, err := json.Marshal(commit{run, c.ID, c.Step, c.EndedAt})
		if err != nil {
			return err
		}
		return p.Annotate(ctx, map[string]string{lastCommit: string(text)})
	}, nil
}
