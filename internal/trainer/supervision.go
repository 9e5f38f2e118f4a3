package trainer

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/session"
)

const supervisionHelp = `SIGTERM, SIGUSR1 and ckptstore preempt preempt the job: the workers learn of it in
the answers to their reports, at the same step on all ranks, then save and end
within --preempt-grace. Schedulers may signal every process of the job: connected
workers hold SIGTERM and SIGUSR1 back and pass them on, and a script's own handlers
stay. Workers that neither report nor ask get SIGTERM at once. SIGINT, SIGHUP,
SIGQUIT or a second SIGTERM stop them: SIGTERM, and SIGKILL after --grace. After
ckptstore stop, workers that listen first have --grace to end by themselves. The
trial is paused; the next job of the run continues it.

While the log does not answer, because its owner is paused, its disk slow or full or
its cluster without a leader, no job ends: the training continues, up to 10,000
reports ahead of the log, then it waits. Staged saves are committed when the log
answers again. A job that is asked to end meanwhile waits for the log for 30 s more
after its workers have ended.

Exit codes: 0 done, or stopped by ckptstore stop; 1 no restart is left, the last
save was lost, a disk is full, a device is not healthy, or this node is excluded
from its job; 5 another job runs the run, or has taken it over, or another live node has
this node's index; 10 no store; 11 the store is locked; 12 the server of the
log denies access, or another user can write to the store or to shared memory;
64 bad configuration; 70 internal; 75 preempted, with the work saved in a
checkpoint; 143 preempted without; 128+n signal n.`

// supervisionOptions configure how failures are counted and how a job is ended.
type supervisionOptions struct {
	maxInfraRestarts int
	preemptGrace     time.Duration
	walltime         string
}

func (o *supervisionOptions) flags(f *pflag.FlagSet) {
	f.IntVar(&o.maxInfraRestarts, "max-infra-restarts", 10, "tolerated failures of devices and of the log, counted apart from --max-restarts; -1 for any number")
	f.DurationVar(&o.preemptGrace, "preempt-grace", 2*time.Minute, "time for workers to save and end after a preemption, before SIGTERM")
	f.StringVar(&o.walltime, "walltime", "", "how long the job may take: it is preempted --preempt-grace and --grace before its end; auto reads $"+slurmEnd+", or asks squeue")
}

// apply sets the options in the configuration of a job.
func (o *supervisionOptions) apply(ctx context.Context, cfg *launch.Config, now time.Time) error {
	if o.maxInfraRestarts < -1 {
		return fmt.Errorf("%w: --max-infra-restarts %d: give 0 or more, or -1 for any number", launch.ErrConfig, o.maxInfraRestarts)
	}
	if o.preemptGrace <= 0 || o.preemptGrace > session.MaxDuration {
		return fmt.Errorf("%w: --preempt-grace %v: give a duration of more than 0, such as 2m, and at most %v", launch.ErrConfig, o.preemptGrace, session.MaxDuration)
	}
	cfg.MaxInfraRestarts, cfg.PreemptGrace = o.maxInfraRestarts, o.preemptGrace
	if o.walltime == "" {
		return nil
	}
	end, err := deadline(ctx, o.walltime, now)
	if err != nil {
		return fmt.Errorf("%w: %w", launch.ErrConfig, err)
	}
	if end.IsZero() {
		return nil // Slurm ends the job by a signal, if at all
	}
	if needed := cfg.PreemptGrace + cfg.Grace; end.Sub(now) <= needed {
		return fmt.Errorf("%w: --walltime %s: the job ends in %v, and --preempt-grace and --grace need %v of it; increase the time or reduce these", launch.ErrConfig, o.walltime, end.Sub(now).Round(time.Second), needed)
	}
	cfg.Deadline = end
	return nil
}

// hangOptions configure when a silent rank counts as hung.
type hangOptions struct {
	hangTimeout time.Duration
}

func (o *hangOptions) flags(f *pflag.FlagSet) {
	f.DurationVar(&o.hangTimeout, "hang-timeout", 0, "after this long without a request from a rank that made some before, print all stacks and restart the group; 0 for never")
}

func (o hangOptions) check() error {
	if o.hangTimeout < 0 || o.hangTimeout > session.MaxDuration {
		return fmt.Errorf("%w: --hang-timeout %v: give a duration of more than 0, such as 10m, and at most %v, or 0 for never", launch.ErrConfig, o.hangTimeout, session.MaxDuration)
	}
	return nil
}

// Environment of a job of Slurm.
const (
	slurmEnd = "SLURM_JOB_END_TIME" // when Slurm ends the job, in unix seconds; 22.05 does not set it
	slurmJob = "SLURM_JOB_ID"
)

// squeueLimit bounds the query to Slurm's controller. A failover of the
// controller takes longer. Then the trainer fails instead of training without the
// deadline that it was given.
const squeueLimit = 30 * time.Second

// deadline returns the end of the time that --walltime gives. It is zero if Slurm
// does not limit the job's time.
func deadline(ctx context.Context, walltime string, now time.Time) (time.Time, error) {
	if walltime != "auto" {
		d, err := time.ParseDuration(walltime)
		if err != nil || d <= 0 {
			return time.Time{}, fmt.Errorf("--walltime %s: give a duration of more than 0, such as 4h, or auto", walltime)
		}
		return now.Add(d), nil
	}
	if end := os.Getenv(slurmEnd); end != "" {
		seconds, err := strconv.ParseInt(end, 10, 64)
		if err != nil {
			return time.Time{}, fmt.Errorf("--walltime auto: $%s is %q, want seconds since 1970; give a duration such as 4h", slurmEnd, end)
		}
		return time.Unix(seconds, 0), nil
	}
	job := os.Getenv(slurmJob)
	if job == "" {
		return time.Time{}, fmt.Errorf("--walltime auto: neither $%s nor $%s is set; give a duration such as 4h, or start this as a job of Slurm", slurmEnd, slurmJob)
	}
	said, err := squeue(ctx, job)
	if err == nil {
		var end time.Time
		if end, err = jobEnd(said, job); err == nil {
			return end, nil
		}
	}
	return time.Time{}, fmt.Errorf("--walltime auto: $%s is not set, and squeue does not report when job %s ends: %w; give a duration such as 4h", slurmEnd, job, err)
}

// squeue asks Slurm for a job's end and time limit. For the last job of an array
// it lists the other jobs too.
func squeue(ctx context.Context, job string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, squeueLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, "squeue", "--noheader", "--jobs="+job, "--format=%A %e %l")
	cmd.Env = append(os.Environ(), "SLURM_TIME_FORMAT=%s") // seconds since 1970, in no time zone
	cmd.WaitDelay = time.Second
	out, err := cmd.Output()
	if ctx.Err() != nil {
		return "", fmt.Errorf("no answer within %v: is slurmctld up", squeueLimit)
	}
	if failed := (*exec.ExitError)(nil); errors.As(err, &failed) && len(failed.Stderr) > 0 {
		return "", fmt.Errorf("%w: %.500s", err, strings.TrimSpace(string(failed.Stderr)))
	}
	return string(out), err
}

// jobEnd finds a job's line in the output of squeue. The end is zero for a job
// without a time limit, for which Slurm assumes an end in a year.
func jobEnd(said, job string) (time.Time, error) {
	for line := range strings.Lines(said) {
		f := strings.Fields(line)
		if len(f) != 3 || f[0] != job {
			continue
		}
		if f[2] == "UNLIMITED" {
			return time.Time{}, nil
		}
		if seconds, err := strconv.ParseInt(f[1], 10, 64); err == nil {
			return time.Unix(seconds, 0), nil
		}
		return time.Time{}, fmt.Errorf("its end is %q and its time limit %q", f[1], f[2])
	}
	return time.Time{}, fmt.Errorf("it is not in %q", said)
}
