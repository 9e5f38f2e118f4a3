package answer

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/launch/logs"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/projections"
)

// Output is where the output of a job's workers lies.
type Output struct {
	Job projections.Job
	Dir string // of the files
	Top string // the directory above it, below which no symbolic link is followed
}

// OutputOf finds the output of a job of a run: of the newest one, if id is empty. That of a search is
// apart by trial; that of the default trial, or of none, is the job's. It returns a [projections.NotFoundError] for a job that kept
// none, or none that this machine can reach.
func OutputOf(ctx context.Context, from From, run, id, trial string) (Output, error) {
	if err := KnownRun(ctx, from.Views, run); err != nil {
		return Output{}, err
	}
	r, err := ReadRun(ctx, from, run)
	if err != nil {
		return Output{}, err
	}
	job, err := FindJob(r, run, id)
	if err != nil {
		return Output{}, err
	}
	none := func(format string, values ...any) error {
		return &projections.NotFoundError{What: "output of job", Ref: job.ID, Hint: fmt.Sprintf(format, values...)}
	}
	dir, home := job.Logs, from.Store.Dir()
	top := filepath.Dir(filepath.Dir(dir)) // the directory of --log-dir
	switch {
	case dir == "":
		return Output{}, none("the job kept none: its trainer had no log directory, as in `trainer demo`, or with a store that has no directory and no --log-dir")
	case !filepath.IsAbs(dir) && !filepath.IsLocal(dir):
		return Output{}, none("its event names %s, which is not below the store", dir)
	case !filepath.IsAbs(dir) && home == "":
		return Output{}, none("it is in %s of the store's directory, which this machine does not have: run the command where the directory is", dir)
	case !filepath.IsAbs(dir):
		return Output{Job: job, Dir: within(filepath.Join(home, dir), trial), Top: home}, nil
	}
	if _, err := os.Stat(top); errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
		return Output{}, none("it is in %s on %s, which this machine cannot access: run the command there", dir, job.Host)
	}
	return Output{Job: job, Dir: within(dir, trial), Top: top}, nil
}

// within returns the directory of a trial of a search in that of its job.
func within(dir, trial string) string {
	if trial == "" || trial == projections.DefaultTrial {
		return dir
	}
	return filepath.Join(dir, events.EncodeName(trial))
}

// LoggedLine is one line of the output of a worker.
type LoggedLine struct {
	Attempt int       `json:"attempt"`
	Rank    int       `json:"rank"`
	Stream  string    `json:"stream"` // out or err
	Time    time.Time `json:"time"`   // at which the trainer received it
	Text    string    `json:"text"`
}

// Logged returns a line as it is shown.
func Logged(l logs.Line) LoggedLine {
	return LoggedLine{l.Attempt, l.Rank, string(l.Stream), l.Time, string(l.Text)}
}

// LinesQuery selects lines of the output of a job.
type LinesQuery struct {
	Run, Job string // Job "": the newest
	Trial    string // of a search; "": the job is of none
	Attempt  int    // 0: all
	Rank     int    // -1: all
	Stream   string // "": both
	Contains string // a part of the text
	Most     int    // lines of the answer

	// Below are directories that may have the output, besides that of the store. What else a log
	// names is not read: its writer is not the user whose files these would be.
	Below []string
}

// LastLines is the end of the output of a job.
type LastLines struct {
	Run     string       `json:"run"`
	Job     string       `json:"job"`
	Lines   []LoggedLine `json:"lines"`   // in the order of time
	Earlier bool         `json:"earlier"` // there are earlier lines of the selection
}

// mostText bounds the text of the lines of an answer, in bytes.
const mostText = 1 << 20

// top returns the directory of the query that has the output.
func (q LinesQuery) top(of Output, home string) (string, error) {
	for _, top := range append([]string{home}, q.Below...) {
		if inner, err := filepath.Rel(top, of.Dir); top != "" && err == nil && filepath.IsLocal(inner) {
			return top, nil
		}
	}
	return "", problem.Errorf(problem.Denied, "the output of job %s is in %s, which this server does not show: start it with --http-logs %s, or run `ckptstore logs` there", of.Job.ID, of.Dir, of.Top)
}

// Lines reads the last lines of a selection, as `logs RUN --tail N` prints them: as many as the query
// wants, and at most 1 MiB. It reads the files whole only if the query selects by text.
func Lines(ctx context.Context, from From, q LinesQuery) (LastLines, error) {
	out := LastLines{Run: q.Run, Lines: []LoggedLine{}}
	where, err := OutputOf(ctx, from, q.Run, q.Job, q.Trial)
	if err != nil {
		return out, err
	}
	out.Job = where.Job.ID
	if where.Top, err = q.top(where, from.Store.Dir()); err != nil {
		return out, err
	}
	s := logs.Select{Top: where.Top, Attempt: q.Attempt, Rank: q.Rank, Tail: q.Most + 1, Bytes: mostText}
	if q.Stream != "" {
		s.Streams = []logs.Stream{logs.Stream(q.Stream)}
	}
	if q.Contains != "" {
		s.Tail = -1
	}
	text := 0
	err = logs.Read(ctx, where.Dir, s, nil, func(l logs.Line) error {
		if !strings.Contains(string(l.Text), q.Contains) {
			return nil
		}
		out.Lines = append(out.Lines, Logged(l))
		for text += len(l.Text); len(out.Lines) > q.Most || text > mostText && len(out.Lines) > 1; out.Earlier = true {
			text -= len(out.Lines[0].Text)
			out.Lines = out.Lines[1:]
		}
		return nil
	})
	return out, err
}
