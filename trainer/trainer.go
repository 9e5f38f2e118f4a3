// Package trainer is a trainer of your own: the program trainer with your backend, with
// hooks around the life of each worker group, and with your storage. Its command line,
// its log and its exit codes stay those of the command trainer, which is this package
// without an option.
//
//	func main() {
//		os.Exit(trainer.Main(context.Background(),
//			trainer.WithBackend("mesh", mesh{}),
//			trainer.WithStorage(packed{}),
//		))
//	}
//
// The job names the backend, as in `mytrainer run --backend mesh -- ./worker`. What a
// worker needs, with RPC backends of your own among it, is in package client and the
// packages below it.
package trainer

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/ckptstore/ckptstore/internal/launch/backend"
	"github.com/ckptstore/ckptstore/internal/trainer"
)

// Option adds a part to the trainer.
type Option func(*trainer.Parts) error

// WithBackend registers a backend under a name for --backend. The name must be free:
// torch, tensorpipe, process_group and none are taken.
func WithBackend(name string, b Backend) Option {
	return func(p *trainer.Parts) error {
		if b == nil {
			return fmt.Errorf("register backend %q: it is nil: give WithBackend a value", name)
		}
		return p.Backends.Register(backend.Named(name, b))
	}
}

// WithInitHook calls hook for each worker group before devices are shared and the
// backend's OnStart is called. Its error is a failure of the group. There is one such hook.
func WithInitHook(hook func(context.Context, *Group) error) Option {
	return func(p *trainer.Parts) error {
		if p.InitHook != nil {
			return errors.New("set the init hook: there is one already: give one WithInitHook, whose function calls both")
		}
		p.InitHook = hook
		return nil
	}
}

// WithStorage has the checkpoints of jobs written and read by s. There is one storage.
func WithStorage(s Storage) Option {
	return func(p *trainer.Parts) error {
		if p.Storage != nil {
			return fmt.Errorf("set the storage %T: there is one already, %T: give one WithStorage", s, p.Storage)
		}
		p.Storage = s
		return nil
	}
}

// Main runs the trainer on the arguments and streams of this process and returns the
// exit code. An option that cannot be applied ends it with 64. The trainer also starts
// this program by itself, to guard its workers: call Main for every command line that is
// not your own.
func Main(ctx context.Context, options ...Option) int {
	parts := trainer.Parts{Backends: backend.Builtin()}
	for _, option := range options {
		if err := option(&parts); err != nil {
			fmt.Fprintln(os.Stderr, "trainer:", err)
			return 64
		}
	}
	return trainer.Main(ctx, parts)
}

// Backend is what a communication backend does around the life of a worker group:
//
//	OnStart(ctx, *Group) error             before any process exists; sets Worker.Env
//	OnTrainingStart(ctx, *Group) error     all workers have connected, and train
//	OnShutdown(ctx, *Group) error          all have ended well, or are about to get SIGTERM
//	EncodeData(map[string]any) (…, error)  metrics, on the worker
//	DecodeData(map[string]any) (…, error)  the same, on the trainer
//	ShareVisibleDevices() bool             workers of a node see all its devices
//
// An error of the first two is a failure of the group, which is started again while
// --max-restarts allows it. Embed [DefaultBackend] and write the methods that you need.
type Backend = backend.Backend

// DefaultBackend does nothing in each hook.
type DefaultBackend = backend.Default

// FailureObserver is a backend that is told when a group fails, in the place of
// OnShutdown: OnFailure(ctx, *Group, cause error). Its error is logged.
type FailureObserver = backend.FailureObserver

// HelloHolder is a backend whose OnTrainingStart ends before any worker's connection is
// answered, if HoldsHello() is true. Then every worker of the group has to connect.
type HelloHolder = backend.Gate

// Group is the workers of one attempt: Run, Trial, Job, Attempt, MasterAddr, MasterPort,
// and Workers by rank.
type Group = backend.Group

// Worker is one of a group: Rank, LocalRank, LocalSize, NodeRank, Nodes, Node, Devices,
// Visible, and Env, which OnStart may add to.
type Worker = backend.Worker
