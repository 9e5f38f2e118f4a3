package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/launches"
	"github.com/ckptstore/ckptstore/internal/redact"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

// envTrainer names the trainer that `continue` starts.
const envTrainer = "CKPTSTORE_TRAINER"

// envStore is the variable that stands for --store.
const envStore = "CKPTSTORE_STORE"

// errNoLaunch says that the log does not say how a job was launched.
var errNoLaunch = errors.New("the log does not say how the job was launched")

// relaunch is `continue --dry-run --json`: what would be run, and where.
type relaunch struct {
	Run      string       `json:"run"`
	Job      string       `json:"job"` // the one that is continued
	Dir      string       `json:"dir"`
	Command  []string     `json:"command"`
	Recorded launchRecord `json:"recorded"`

	url      string // of the store, which goes through the environment: others see arguments
	proof    func(ctx context.Context, dir fs.FileInfo) error
	unproven error // why nothing proves that this user launched the job; nil if it is proven
}

func (a *app) continueCommand() *cobra.Command {
	var dry, yes bool
	c := &cobra.Command{
		Use: "continue RUN [-- ARG...]", Short: "Launch the last job of a run again",
		Long: `Start trainer run as the run's newest job was started: with its flags and its
command, in its directory. The new job resumes from the last committed checkpoint
of the run. Arguments after -- are added to the command, whose own options may
be given again there, such as a later last step.

A run whose job lives is refused with exit code 5. One that is completed, stopped,
failed or lost is continued. Of the old flags, --resume with a checkpoint or with
none is left out: that was about the job before. The program is the trainer beside
ckptstore, or the one in $PATH, or $` + envTrainer + `; it takes the place of
this process, so that its exit code is the job's.

A command with secrets is refused with exit code 2: their values are [redacted]
in the log. The command is printed, to be run by hand with the values in place.

Any client that can append to the log can write such a command there. It is executed
at once only if a trainer of this user recorded it: a trainer keeps the digest of
what it appended in $XDG_STATE_HOME/ckptstore (or ~/.local/state/ckptstore), which
only its user can write. Otherwise, as after a job on a machine with another home,
the command is shown and asked about on the terminal; without one it is refused
with exit code 12. --yes executes it without a question.`,
		Example: "  ckptstore continue bert\n  ckptstore continue bert -- --steps 200000\n  ckptstore continue bert --dry-run\n  ckptstore continue bert --yes",
		Args: console.Args(func(c *cobra.Command, given []string) error {
			dash := c.ArgsLenAtDash()
			if dash < 0 {
				return cobra.ExactArgs(1)(c, given)
			}
			return cobra.ExactArgs(1)(c, given[:dash])
		}),
		RunE: func(c *cobra.Command, given []string) error {
			var r relaunch
			err := a.with(c.Context(), func(s *store.Store) (err error) {
				r, err = a.relaunch(c.Context(), s, given[0], given[1:])
				return err
			})
			if err != nil {
				return err
			}
			// What is proven is the directory that the command runs in, not its path.
			entered := r.enter()
			r.prove(c.Context(), entered)
			if dry {
				return a.printRelaunch(r)
			}
			if entered != nil {
				return entered
			}
			if err := r.complete(); err != nil {
				return err
			}
			if err := a.approve(c.Context(), r, yes); err != nil {
				return err
			}
			return r.exec()
		},
	}
	c.Flags().BoolVar(&dry, "dry-run", false, "print the command instead")
	c.Flags().BoolVar(&yes, "yes", false, "execute the command without a question")
	return c
}

func (a *app) relaunch(ctx context.Context, s *store.Store, run string, more []string) (r relaunch, err error) {
	if err := knownRun(ctx, s.Views(), run); err != nil {
		return r, err
	}
	live, err := s.LiveJob(ctx, run)
	if err != nil {
		return r, err
	}
	if live != nil {
		return r, live
	}
	jobs, err := readRun(ctx, s, run)
	if err != nil {
		return r, err
	}
	newest, err := findJob(jobs, run, "")
	if err != nil {
		return r, err
	}
	// The views may be another process's. What is executed is read from the log, where
	// it is proven.
	event, job, err := startedAt(ctx, s, run, newest)
	if err != nil {
		return r, err
	}
	if job.Dir == "" || len(job.Command) == 0 {
		return r, fmt.Errorf("%w: job %s of run %q is of an older version, or made no group of workers: start the next one with `trainer run --name %s -- %s`",
			errNoLaunch, job.Job, run, run, quoted(job.Command))
	}
	trainer, err := findTrainer()
	if err != nil {
		return r, err
	}
	r = relaunch{Run: run, Job: job.Job, Dir: job.Dir, Command: []string{trainer, "run"}}
	r.Recorded = launchRecord{Sequence: event.Sequence, Event: event.ID, Stored: event.Stored.UTC(), Host: job.Host, PID: job.PID}
	id, copied := s.ID, s.Copy
	r.proof = func(ctx context.Context, dir fs.FileInfo) error {
		return launches.Of(id, copied, event, dir).Prove(ctx)
	}
	if store.IsURL(a.location) {
		r.url = a.location
	} else {
		r.Command = append(r.Command, "--store="+s.Location)
	}
	r.Command = append(append(r.Command, "--name="+run), keptFlags(job.Flags)...)
	r.Command = append(append(append(r.Command, "--"), job.Command...), more...)
	return r, nil
}

// keptFlags are the flags of a job that hold for the next one. The command in
// the log is what the workers executed: what made it of the arguments is not
// asked for again.
func keptFlags(flags []string) []string {
	kept := slices.DeleteFunc(slices.Clone(flags), func(flag string) bool {
		switch name, value, _ := strings.Cut(flag, "="); name {
		case "--store", "--name", "--module", "--run-path", "--no-python":
			return true
		case "--resume":
			return value != "require"
		}
		return false
	})
	return append(kept, "--no-python=true")
}

// findTrainer is the trainer to start.
func findTrainer() (string, error) {
	if named := os.Getenv(envTrainer); named != "" {
		path, err := exec.LookPath(named)
		if err != nil {
			return "", fmt.Errorf("$%s: %w", envTrainer, err)
		}
		return filepath.Abs(path)
	}
	if self, err := os.Executable(); err == nil {
		if path, err := exec.LookPath(filepath.Join(filepath.Dir(self), "trainer")); err == nil {
			return path, nil
		}
	}
	path, err := exec.LookPath("trainer")
	if err != nil {
		return "", fmt.Errorf("find the trainer beside ckptstore or in $PATH: %w: install it, or name it in $%s", err, envTrainer)
	}
	return filepath.Abs(path)
}

func (a *app) printRelaunch(r relaunch) error {
	if a.Format == "json" || a.Format == "jsonl" {
		return console.Emit(a.Console, r, []relaunch{r}, nil)
	}
	if hidden := redact.Marked(r.Command); len(hidden) > 0 {
		a.Warn("the log does not have the values of %s: put them in the place of %s", strings.Join(hidden, ", "), redact.Mark)
	}
	if !a.Quiet {
		fmt.Fprintln(a.Err, r.recordedBy())
	}
	_, err := fmt.Fprintln(a.Out, r.shell())
	return err
}

// shell is the command as a shell takes it. What would change the look of a
// terminal is escaped.
func (r relaunch) shell() string {
	env := ""
	if r.url != "" {
		env = envStore + "=" + quoted([]string{jetlog.Redacted(r.url)}) + " "
	}
	return fmt.Sprintf("cd %s && %s%s", quoted([]string{r.Dir}), env, quoted(r.Command))
}

// complete refuses a command of which the log does not have all. It is a
// mistake of usage: the user has to give what is missing.
func (r relaunch) complete() error {
	hidden := redact.Marked(r.Command)
	if len(hidden) == 0 {
		return nil
	}
	return console.Usagef("continue run %q: the log does not have the values of %s: put them in the place of %s and run\n  %s",
		r.Run, strings.Join(hidden, ", "), redact.Mark, r.shell())
}

// enter goes to the directory of the job.
func (r relaunch) enter() error {
	if err := os.Chdir(r.Dir); err != nil {
		return fmt.Errorf("continue run %q where job %s ran: %w: go there, or `ckptstore continue %s --dry-run` prints the command", r.Run, r.Job, err, r.Run)
	}
	return nil
}

// exec makes this process the trainer.
func (r relaunch) exec() error {
	set := []string{"PWD=" + r.Dir}
	if r.url != "" {
		set = append(set, envStore+"="+r.url)
	}
	env := slices.DeleteFunc(os.Environ(), func(kv string) bool {
		name, _, _ := strings.Cut(kv, "=")
		return slices.ContainsFunc(set, func(s string) bool { return strings.HasPrefix(s, name+"=") })
	})
	if err := syscall.Exec(r.Command[0], r.Command, append(env, set...)); err != nil {
		return fmt.Errorf("start %s: %w", r.Command[0], err)
	}
	return nil
}

// launchRecord says who recorded a job.started. Everything but Proven is its author's
// word.
type launchRecord struct {
	Proven   bool      `json:"proven"` // by a trainer of this user
	Doubt    string    `json:"doubt,omitempty"`
	Sequence uint64    `json:"sequence"`
	Event    string    `json:"event"` // ID
	Stored   time.Time `json:"stored"`
	Host     string    `json:"host"`
	PID      int       `json:"pid"`
}

// startedAt reads the job.started of a job.
func startedAt(ctx context.Context, s *store.Store, run string, of projections.Job) (events.Recorded, *events.JobStarted, error) {
	if of.StartedSeq == 0 {
		return events.Recorded{}, nil, fmt.Errorf("%w: job %s of run %q has no job.started", errNoLaunch, of.ID, run)
	}
	event, err := s.Log.At(ctx, of.StartedSeq)
	if err != nil {
		return event, nil, err
	}
	body, err := event.Body()
	if err != nil {
		return event, nil, err
	}
	job, ok := body.(*events.JobStarted)
	if !ok || event.Scope.Run != run || job.Job != of.ID {
		return event, nil, fmt.Errorf("continue run %q: event %d is not the start of job %s: the views differ from the log: `ckptstore views rebuild`", run, of.StartedSeq, of.ID)
	}
	return event, job, nil
}

// prove notes whether a trainer of this user recorded the launch. entered is why
// this process is not in the job's directory.
func (r *relaunch) prove(ctx context.Context, entered error) {
	err := entered
	var dir fs.FileInfo
	if err == nil {
		dir, err = os.Stat(".")
	}
	if err == nil {
		err = r.proof(ctx, dir)
	}
	if r.unproven, r.Recorded.Proven = err, err == nil; err != nil {
		r.Recorded.Doubt = err.Error()
	}
}

// recordedBy says who recorded the command.
func (r relaunch) recordedBy() string {
	text := fmt.Sprintf("job %s of run %s, event %d of %s: ", quoted([]string{r.Job}), quoted([]string{r.Run}), r.Recorded.Sequence, console.When(r.Recorded.Stored))
	from := fmt.Sprintf("process %d on %s", r.Recorded.PID, quoted([]string{r.Recorded.Host}))
	if r.unproven == nil {
		return text + "recorded by this user, " + from
	}
	return text + r.unproven.Error() + "; its author claims to be " + from
}

// errDeclined says that a command was not executed, because the user has not agreed to it.
var errDeclined = errors.New("not allowed")

// approve shows the command and lets it pass if it is proven to be this user's, or
// if the user agrees.
func (a *app) approve(ctx context.Context, r relaunch, yes bool) error {
	if !a.Quiet || r.unproven != nil {
		fmt.Fprintf(a.Err, "%s\n%s\n", r.recordedBy(), r.shell())
	}
	if yes || r.unproven == nil {
		return nil
	}
	agreed, err := a.Ask(ctx, "Execute it? [y/N] ")
	if err == nil && !agreed {
		err = errors.New("you did not agree")
	}
	if err != nil {
		return fmt.Errorf("continue run %q: %w: %w: read the command; `ckptstore continue %s --yes` executes it", r.Run, errDeclined, err, quoted([]string{r.Run}))
	}
	return nil
}
