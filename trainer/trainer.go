// Package trainer builds your own trainer: the program trainer with your backend,
// with hooks around the life of each worker group, and with your storage. Its
// command line, its log and its exit codes are those of the command trainer,
// which is this package without an option.
//
//	func main() {
//		os.Exit(trainer.Main(context.Background(),
//			trainer.WithBackend("mesh", mesh{}),
//			trainer.WithStorage(packed{}),
//		))
//	}
//
// The job names the backend, as in `mytrainer run --backend mesh -- ./worker`.
// Workers use package client and the packages below it, also for RPC backends of
// your own.
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
// backend's OnStart is called. Its error fails the group. Only one such hook is
// allowed.
func WithInitHook(hook func(context.Context, *Group) error) Option {
	return func(p *trainer.Parts) error {
		if p.InitHook != nil {
			return errors.New("set the init hook: there is one already: give one WithInitHook, whose function calls both")
		}
		p.InitHook = hook
		return nil
	}
}

// WithStorage makes s write and read the checkpoints of jobs. Only one storage is
// allowed.
func WithStorage(s Storage) Option {
	return func(p *trainer.Parts) error {
		if p.Storage != nil {
			return fmt.Errorf("set the storage %T: there is one already, %T: give one WithStorage", s, p.Storage)
		}
		p.Storage = s
		return nil
	}
}

// Main runs the trainer on the arguments and streams of this process and returns
// the exit code. It returns 64 if an option cannot be applied. The trainer also
// starts this program itself, to guard its workers: call Main for every command
// line that is not your own.
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
// An error of the first two fails the group, which restarts while --max-restarts
// allows it. Embed [DefaultBackend] and write the methods that you need.
type Backend = backend.Backend

// DefaultBackend does nothing in each hook.
type DefaultBackend = backend.Default

// FailureObserver is a backend whose OnFailure(ctx, *Group, cause error) is
// called instead of OnShutdown when a group fails. Its error is logged.
type FailureObserver = backend.FailureObserver

// HelloHolder is a backend whose OnTrainingStart ends before the trainer answers
// any worker's connection, if HoldsHello() is true. Every worker of the group
// must then connect.
type HelloHolder = backend.Gate

// Group is the workers of one attempt: Run, Trial, Job, Attempt, MasterAddr, MasterPort,
// and Workers by rank.
type Group = backend.Group

// Worker is a worker of a group: Rank, LocalRank, LocalSize, NodeRank, Nodes,
// Node, Devices, Visible, and Env, to which OnStart may add.
type Worker = backend.Worker
