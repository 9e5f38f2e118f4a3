package launch

import (
	"context"
	"fmt"
	"io"
	"os"
	"slices"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/launch/logs"
	"github.com/ckptstore/ckptstore/internal/launch/process"
	"github.com/ckptstore/ckptstore/internal/session"
)

// Launch records how the trainer was launched, so that the job can be launched
// again.
type Launch struct {
	Flags []string // of the trainer, without the command
	Dir   string   // working directory

	SlurmJob      string // ID of the job of Slurm; empty: none
	SlurmRestarts int    // how often Slurm requeued it

	// Recorded, when set, is called with job.started once it is in the log.
	Recorded func(context.Context, events.Recorded)
}

// Began records the start of a job whose trials are trained by [Run] with
// [Config.Shared]. ended records its end, with the error that ended it, and returns that
// error joined with its own. The caller holds the run's lease.
func Began(ctx context.Context, cfg Config, store session.Store) (ended func(reason string, err error) error, err error) {
	cfg = cfg.withDefaults()
	host, err := os.Hostname()
	if err != nil {
		return nil, fmt.Errorf("hostname: %w", err)
	}
	j := prepare(ctx, cfg, store, nil)
	if err := j.started(ctx, host); err != nil {
		return nil, err
	}
	return func(reason string, err error) error {
		j.reason = reason
		return j.recordEnd(ctx, err)
	}, nil
}

// Output configures where the workers' output goes. The zero value prints it and
// keeps nothing.
type Output struct {
	Dir      string // of the files; empty: none, and Routes must not route to files
	Top      string // a parent directory, below which no symbolic link is followed
	Recorded string // Dir as recorded in the log: relative to the store's directory, or absolute
	MaxSize  int64  // of a file, in bytes; 0: [logs.DefaultMaxSize]
	Routes   logs.Routes
}

// openOutput returns the directory that keeps the job's output.
func (j *job) openOutput() *logs.Dir {
	return logs.NewDir(j.cfg.Output.Dir, logs.Options{
		Top:     j.cfg.Output.Top,
		MaxSize: j.cfg.Output.MaxSize, Now: j.cfg.Now,
		Failed: func(err error) {
			j.log.Warn("worker output no longer kept in files, only on the terminal; free space on that disk, or choose another with --log-dir", "error", err)
		},
	})
}

// outputs returns the writers of a rank's lines. The files among them are closed
// at the end of the attempt.
func (w *watch) outputs(rank int) (stdout, stderr io.Writer) {
	prefix := ""
	if w.cfg.World() > 1 {
		prefix = fmt.Sprintf("[rank%d] ", rank)
	}
	one := func(s logs.Stream, terminal io.Writer) io.Writer {
		var to []io.Writer
		file, shown := w.cfg.Output.Routes.Of(slices.Index(w.cfg.Local(), rank), s)
		if file && w.cfg.Output.Dir != "" {
			f := w.output.File(w.group.Number, rank, s)
			w.files = append(w.files, f)
			to = append(to, f) // first, since a terminal may block
		}
		switch shows := process.Prefixed(terminal, prefix); {
		case shown:
			to = append(to, shows)
		case file:
			to = append(to, unkept{w.output, shows})
		}
		return io.MultiWriter(to...)
	}
	return one(logs.Out, w.cfg.Stdout), one(logs.Err, w.cfg.Stderr)
}

// unkept shows output on the terminal that was routed only to a file, once files
// cannot be written.
type unkept struct {
	dir *logs.Dir
	to  io.Writer
}

// Write implements [io.Writer].
func (u unkept) Write(text []byte) (int, error) {
	if u.dir.Failed() {
		return u.to.Write(text)
	}
	return len(text), nil
}

// closeFiles closes the files of the attempt's output.
func (w *watch) closeFiles() {
	for _, f := range w.files {
		if err := f.Close(); err != nil {
			w.log.Warn("end of a rank's output may be missing in its file", "error", err)
		}
	}
}
