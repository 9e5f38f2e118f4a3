package main

import (
	"errors"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/worker"
)

func TestWalltime(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	for _, c := range []struct {
		walltime, slurm string
		left            time.Duration // 0: refused
		says            string
	}{
		{"4h", "", 4 * time.Hour, ""},
		{"auto", strconv.FormatInt(now.Add(time.Hour).Unix(), 10), time.Hour, ""},
		{"auto", "", 0, "SLURM_JOB_END_TIME is not set"},
		{"auto", "tomorrow", 0, "want seconds since 1970"},
		{"auto", strconv.FormatInt(now.Add(time.Minute).Unix(), 10), 0, "the job ends in 1m0s"},
		{"2m", "", 0, "need 2m10s of it"},
		{"-4h", "", 0, "a duration of more than 0"},
		{"long", "", 0, "such as 4h, or auto"},
	} {
		t.Run(c.walltime+" "+c.slurm, func(t *testing.T) {
			t.Setenv(slurmEnd, c.slurm)
			cfg := worker.Config{Grace: 10 * time.Second}
			o := supervisionOptions{maxInfraRestarts: 10, preemptGrace: 2 * time.Minute, walltime: c.walltime}
			err := o.apply(&cfg, now)
			if c.left == 0 {
				if !errors.Is(err, worker.ErrConfig) || !strings.Contains(err.Error(), c.says) {
					t.Errorf("error %v, want one that says %q", err, c.says)
				}
				return
			}
			if err != nil || !cfg.Deadline.Equal(now.Add(c.left)) {
				t.Errorf("deadline %v, error %v", cfg.Deadline, err)
			}
		})
	}
}
