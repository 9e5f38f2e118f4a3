package main

import (
	"context"
	"fmt"
	"os"
	"strings"

	"github.com/ckptstore/ckptstore/trainer"
)

// mesh is a backend whose workers call each other in a ring. Through the
// environment it gives each worker its RPC backend and the rank to call.
type mesh struct{ trainer.DefaultBackend }

// Environment of a worker.
const (
	envRPC  = "MESH_RPC"  // name of the RPC backend
	envNext = "MESH_NEXT" // rank that the worker calls
)

// metricPrefix precedes the names of metrics on their way to the trainer.
const metricPrefix = "mesh."

var (
	_ trainer.Backend         = mesh{}
	_ trainer.FailureObserver = mesh{}
)

// OnStart sets the environment of each worker, before its process starts.
func (mesh) OnStart(_ context.Context, g *trainer.Group) error {
	logf("attempt %d starts with %d workers", g.Attempt, len(g.Workers))
	for _, w := range g.Workers {
		w.Env[envRPC] = httpCall
		w.Env[envNext] = fmt.Sprint((w.Rank + 1) % len(g.Workers))
	}
	return nil
}

// OnTrainingStart runs when all workers have connected.
func (mesh) OnTrainingStart(_ context.Context, g *trainer.Group) error {
	logf("attempt %d trains", g.Attempt)
	return nil
}

// OnFailure runs when no process of a failed group is left.
func (mesh) OnFailure(_ context.Context, g *trainer.Group, cause error) error {
	logf("attempt %d failed: %v", g.Attempt, cause)
	return nil
}

// OnShutdown runs at a graceful end.
func (mesh) OnShutdown(_ context.Context, g *trainer.Group) error {
	logf("attempt %d ends", g.Attempt)
	return nil
}

// EncodeData runs on the worker, before metrics are sent.
func (mesh) EncodeData(metrics map[string]any) (map[string]any, error) {
	out := make(map[string]any, len(metrics))
	for name, v := range metrics {
		out[metricPrefix+name] = v
	}
	return out, nil
}

// DecodeData runs on the trainer: it inverts EncodeData.
func (mesh) DecodeData(metrics map[string]any) (map[string]any, error) {
	out := make(map[string]any, len(metrics))
	for name, v := range metrics {
		plain, ok := strings.CutPrefix(name, metricPrefix)
		if !ok {
			return nil, fmt.Errorf("metric %q has no prefix %q", name, metricPrefix)
		}
		out[plain] = v
	}
	return out, nil
}

// logf writes a line to standard error.
func logf(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "mesh: "+format+"\n", args...)
}
