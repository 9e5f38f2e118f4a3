package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"
)

// Environment of a job of Slurm.
const (
	slurmEnd = "SLURM_JOB_END_TIME" // when Slurm ends the job, in unix seconds; 22.05 does not set it
	slurmJob = "SLURM_JOB_ID"
)

// squeueLimit bounds the question to Slurm's controller. A controller that fails
// over is away for longer: then the trainer says so instead of training without
// an end that it was told to observe.
const squeueLimit = 30 * time.Second

// deadline is the end of the time that --walltime gives; zero: there is none,
// because Slurm gives the job all the time that it takes.
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
			return time.Time{}, fmt.Errorf("--walltime auto: $%s is %q, want seconds since 1970: give a duration such as 4h", slurmEnd, end)
		}
		return time.Unix(seconds, 0), nil
	}
	job := os.Getenv(slurmJob)
	if job == "" {
		return time.Time{}, fmt.Errorf("--walltime auto: neither $%s nor $%s is set: give a duration such as 4h, or start this as a job of Slurm", slurmEnd, slurmJob)
	}
	said, err := squeue(ctx, job)
	if err == nil {
		var end time.Time
		if end, err = jobEnd(said, job); err == nil {
			return end, nil
		}
	}
	return time.Time{}, fmt.Errorf("--walltime auto: $%s is not set, and squeue does not say when job %s ends: %w: give a duration such as 4h", slurmEnd, job, err)
}

// squeue asks Slurm for a job's end and time limit. Of an array's last job it
// lists the others too.
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
// without a time limit, for which Slurm assumes one in a year.
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
