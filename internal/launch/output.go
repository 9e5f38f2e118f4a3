package launch

import (
	"context"
	"fmt"
	"io"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/launch/logs"
	"github.com/ckptstore/ckptstore/internal/launch/process"
)

// Launch is how the trainer was launched, with which the job is launched again.
type Launch struct {
	Flags []string // of the trainer, without the command
	Dir   string   // working directory
	// Recorded, when set, is called with job.started once it is in the log.
	Recorded func(context.Context, events.Recorded)
}

// Output says what becomes of what the workers print. The zero value prints it
// and keeps nothing.
type Output struct {
	Dir     string // of the files; empty: there are none, and Routes must ask for none
	Top     string // a directory above, below which no symbolic link is followed
	Said    string // the same as the log is told: below the store's directory, or absolute
	MaxSize int64  // of a file, in bytes; 0: [logs.DefaultMaxSize]
	Routes  logs.Routes
}

// openOutput is where the job's output is kept.
func (j *job) openOutput() *logs.Dir {
	return logs.NewDir(j.cfg.Output.Dir, logs.Options{
		Top:     j.cfg.Output.Top,
		MaxSize: j.cfg.Output.MaxSize, Now: j.cfg.Now,
		Failed: func(err error) {
			j.log.Warn("the output of workers is not kept in files any more, and goes to the terminal: make room on that disk, or choose another with --log-dir", "error", err)
		},
	})
}

// outputs are the writers of a rank's lines. The files among them are closed
// at the end of the attempt.
func (w *watch) outputs(rank int) (stdout, stderr io.Writer) {
	prefix := ""
	if w.cfg.World() > 1 {
		prefix = fmt.Sprintf("[rank%d] ", rank)
	}
	one := func(s logs.Stream, terminal io.Writer) io.Writer {
		var to []io.Writer
		file, shown := w.cfg.Output.Routes.Of(rank, s)
		if file && w.cfg.Output.Dir != "" {
			f := w.output.File(w.group.Number, rank, s)
			w.files = append(w.files, f)
			to = append(to, f) // first, as a terminal may block
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

// unkept shows what was to be in a file alone, once there are no files.
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

// closeFiles ends the files of the attempt's output.
func (w *watch) closeFiles() {
	for _, f := range w.files {
		if err := f.Close(); err != nil {
			w.log.Warn("the end of a rank's output may be missing in its file", "error", err)
		}
	}
}
