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
	"github.com/ckptstore/ckptstore/internal/answer"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/launches"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/redact"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

// envTrainer names the trainer that `continue` starts.
const envTrainer = "CKPTSTORE_TRAINER"

// envStore is the environment variable for --store.
const envStore = "CKPTSTORE_STORE"

// errNoLaunch means that the log has no launch command of a job.
var errNoLaunch = errors.New("the log does not record how the job was launched")

// relaunch is the output of `continue --dry-run --json`: the command and its directory.
type relaunch struct {
	Run      string       `json:"run"`
	Job      string       `json:"job"` // the job to continue
	Dir      string       `json:"dir"`
	Command  []string     `json:"command"`
	Recorded launchRecord `json:"recorded"`

	url      string // of the store; passed in the environment, because other users can see arguments
	proof    func(ctx context.Context, dir fs.FileInfo) error
	unproven error // why it is not proven that this user launched the job; nil if it is
}

func (a *app) continueCommand() *cobra.Command {
	var dry, yes bool
	c := &cobra.Command{
		Use: "continue RUN [-- ARG...]", Short: "Launch the newest job of a run again",
		Long: `Launch the newest job of a run again with trainer run: the same flags and command,
in the same directory. The new job resumes from the last committed checkpoint of the
run. Arguments after -- are appended to the command; use them to override its own
options, such as the number of steps.

The run may be completed, stopped, failed or lost. If its job is still alive, the
command exits with code 5. The old flags are kept, except --resume with a checkpoint
or none, which applied to the old job only. The trainer is the one in the directory of
ckptstore, else in $PATH; $` + envTrainer + ` overrides both. It replaces this
process, so the exit code is the job's.

If the command contains secrets, continue prints it and exits with code 2: the log has
[redacted] in place of their values. Run the command by hand with the values filled in.

Every client that can append to the log can record such a command. So it is run at once
only if a trainer of this user recorded it: trainers keep the digests of what they append
in $XDG_STATE_HOME/ckptstore (or ~/.local/state/ckptstore), which only their user can
write. Otherwise, for example after a job on a machine with another home directory,
continue shows the command and asks on the terminal; without a terminal it exits with
code 12. --yes skips the question.`,
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
			// The proof covers the directory itself, not its path: enter it first.
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
	c.Flags().BoolVar(&dry, "dry-run", false, "print the command instead of running it")
	c.Flags().BoolVar(&yes, "yes", false, "run the command without asking")
	return c
}

func (a *app) relaunch(ctx context.Context, s *store.Store, run string, more []string) (r relaunch, err error) {
	if err := answer.KnownRun(ctx, s.Views(), run); err != nil {
		return r, err
	}
	live, err := s.LiveJob(ctx, run)
	if err != nil {
		return r, err
	}
	if live != nil {
		return r, live
	}
	jobs, err := answer.ReadRun(ctx, answer.Live(s), run)
	if err != nil {
		return r, err
	}
	newest, err := answer.FindJob(jobs, run, "")
	if err != nil {
		return r, err
	}
	// The views may belong to another process. Read the command from the log, where it
	// can be proven.
	event, job, err := startedAt(ctx, s, run, newest)
	if err != nil {
		return r, err
	}
	if job.Dir == "" || len(job.Command) == 0 {
		command := quoted(job.Command)
		if len(job.Command) == 0 || filepath.Base(job.Command[0]) == "ckptstore" { // an import, a recovery
			command = "COMMAND"
		}
		return r, fmt.Errorf("%w: job %s of run %q started no workers; start the next one with `trainer run --name %s -- %s`",
			errNoLaunch, job.Job, run, run, command)
	}
	trainer, err := findTrainer()
	if err != nil {
		return r, err
	}
	verb := "run"
	if slices.ContainsFunc(job.Flags, func(flag string) bool { return strings.HasPrefix(flag, "--search=") }) {
		verb = "tune"
	}
	r = relaunch{Run: run, Job: job.Job, Dir: job.Dir, Command: []string{trainer, verb}}
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

// keptFlags returns the flags of a job that also apply to the next one. The log has
// the command as the workers executed it, so the flags that built it are dropped.
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

// findTrainer returns the path of the trainer to start.
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
		return "", fmt.Errorf("find the trainer next to ckptstore or in $PATH: %w; install it, or name it in $%s", err, envTrainer)
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

// shell returns the command as shell input. Characters that a terminal would
// interpret are escaped.
func (r relaunch) shell() string {
	env := ""
	if r.url != "" {
		env = envStore + "=" + quoted([]string{jetlog.Redacted(r.url)}) + " "
	}
	return fmt.Sprintf("cd %s && %s%s", quoted([]string{r.Dir}), env, quoted(r.Command))
}

// complete returns a usage error if values of the command are redacted in the log:
// the user has to fill them in.
func (r relaunch) complete() error {
	hidden := redact.Marked(r.Command)
	if len(hidden) == 0 {
		return nil
	}
	return console.Usagef("continue run %q: the log does not have the values of %s: put them in the place of %s and run\n  %s",
		r.Run, strings.Join(hidden, ", "), redact.Mark, r.shell())
}

// enter changes to the directory of the job.
func (r relaunch) enter() error {
	if err := os.Chdir(r.Dir); err != nil {
		return fmt.Errorf("continue run %q: enter the directory of job %s: %w; run it on a machine that has the directory, or print the command with `ckptstore continue %s --dry-run`", r.Run, r.Job, err, r.Run)
	}
	return nil
}

// exec replaces this process with the trainer.
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

// launchRecord is the origin of a job.started. Everything except Proven is the claim of
// its author.
type launchRecord struct {
	Proven   bool      `json:"proven"` // recorded by a trainer of this user
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
		return event, nil, fmt.Errorf("continue run %q: event %d is not the start of job %s: the views differ from the log; run `ckptstore views rebuild`", run, of.StartedSeq, of.ID)
	}
	return event, job, nil
}

// prove records whether a trainer of this user recorded the launch. entered is the
// error of entering the job's directory, or nil.
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

// recordedBy describes who recorded the command.
func (r relaunch) recordedBy() string {
	text := fmt.Sprintf("job %s of run %s, event %d of %s: ", quoted([]string{r.Job}), quoted([]string{r.Run}), r.Recorded.Sequence, console.When(r.Recorded.Stored))
	from := fmt.Sprintf("process %d on %s", r.Recorded.PID, quoted([]string{r.Recorded.Host}))
	if r.unproven == nil {
		return text + "recorded by this user, " + from
	}
	return text + r.unproven.Error() + "; its author claims to be " + from
}

// errDeclined means that a command was not executed because the user did not agree to it.
var errDeclined = problem.New(problem.Denied, "not allowed")

// approve shows the command. It returns nil if the command is proven to be this user's,
// or if the user agrees.
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
