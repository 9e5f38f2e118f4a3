package main

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/pflag"

	"github.com/ckptstore/ckptstore/internal/launch"
)

const supervisionHelp = `SIGTERM and SIGUSR1 preempt the job, and so does ckptstore preempt: the workers
are told in the answers to their reports, at the same step on all ranks, save and
end within --preempt-grace. Schedulers may signal every process of the job:
workers that are connected hold SIGTERM and SIGUSR1 back and pass them on, and a
script's own handlers stay. Workers that neither report nor ask get SIGTERM at
once. SIGINT, SIGHUP and SIGQUIT, or a second SIGTERM, stop them: SIGTERM, and
SIGKILL after --grace. After ckptstore stop, workers that listen have --grace to
end by themselves before. The trial is paused; the next job of the run continues it.

While the log does not answer, because its owner is paused, its disk slow or full or
its cluster without a leader, no job ends: the training goes on, up to 10,000 reports
ahead of the log, then it waits; what is staged is committed when the log answers
again. A job that is asked to end meanwhile waits for the log for 30 s more after its
workers have ended.

Exit codes: 0 done, or stopped by ckptstore stop, 1 no restart is left, the last
save was lost, a disk is full, or a device is not healthy, 5 another job runs the
run, or has taken it over, 10 no store, 11 the store is locked, 12 the server of the
log does not allow it or another user can write to the store or to shared
memory, 64 bad configuration, 70 internal, 75 preempted with what was done in a
checkpoint, 143 preempted without, 128+n signal n.`

// supervisionOptions say how failures are counted and how a job is ended.
type supervisionOptions struct {
	maxInfraRestarts int
	preemptGrace     time.Duration
	walltime         string
}

func (o *supervisionOptions) flags(f *pflag.FlagSet) {
	f.IntVar(&o.maxInfraRestarts, "max-infra-restarts", 10, "failures of devices and of the log that are tolerated, beside --max-restarts; -1 for any number")
	f.DurationVar(&o.preemptGrace, "preempt-grace", 2*time.Minute, "time that workers have to save and end when they are told of a preemption, before SIGTERM")
	f.StringVar(&o.walltime, "walltime", "", "how long the job may take: it is preempted --preempt-grace and --grace before its end; auto reads $"+slurmEnd+", or asks squeue")
}

// apply puts what the flags say into the configuration of a job.
func (o *supervisionOptions) apply(ctx context.Context, cfg *launch.Config, now time.Time) error {
	if o.maxInfraRestarts < -1 {
		return fmt.Errorf("%w: --max-infra-restarts %d: give 0 or more, or -1 for any number", launch.ErrConfig, o.maxInfraRestarts)
	}
	if o.preemptGrace <= 0 {
		return fmt.Errorf("%w: --preempt-grace %v: give a duration of more than 0, such as 2m", launch.ErrConfig, o.preemptGrace)
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
		return nil // and Slurm ends the job by a signal, if at all
	}
	if needed := cfg.PreemptGrace + cfg.Grace; end.Sub(now) <= needed {
		return fmt.Errorf("%w: --walltime %s: the job ends in %v, and --preempt-grace and --grace need %v of it: give it more time, or them less", launch.ErrConfig, o.walltime, end.Sub(now).Round(time.Second), needed)
	}
	cfg.Deadline = end
	return nil
}
