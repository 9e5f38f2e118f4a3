package trainer

import (
	"errors"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/launch"
)

func TestWalltime(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	for _, c := range []struct {
		walltime, slurm string
		left            time.Duration // 0: rejected
		says            string
	}{
		{"4h", "", 4 * time.Hour, ""},
		{"auto", strconv.FormatInt(now.Add(time.Hour).Unix(), 10), time.Hour, ""},
		{"auto", "", 0, "neither $SLURM_JOB_END_TIME nor $SLURM_JOB_ID is set"},
		{"auto", "tomorrow", 0, "want seconds since 1970"},
		{"auto", strconv.FormatInt(now.Add(time.Minute).Unix(), 10), 0, "the job ends in 1m0s"},
		{"2m", "", 0, "need 2m10s of it"},
		{"-4h", "", 0, "a duration of more than 0"},
		{"long", "", 0, "such as 4h, or auto"},
	} {
		t.Run(c.walltime+" "+c.slurm, func(t *testing.T) {
			t.Setenv(slurmEnd, c.slurm)
			t.Setenv(slurmJob, "")
			cfg := launch.Config{Grace: 10 * time.Second}
			o := supervisionOptions{maxInfraRestarts: 10, preemptGrace: 2 * time.Minute, walltime: c.walltime}
			err := o.apply(t.Context(), &cfg, now)
			if c.left == 0 {
				if !errors.Is(err, launch.ErrConfig) || !strings.Contains(err.Error(), c.says) {
					t.Errorf("error %v, want %q in it", err, c.says)
				}
				return
			}
			if err != nil || !cfg.Deadline.Equal(now.Add(c.left)) {
				t.Errorf("deadline %v, error %v", cfg.Deadline, err)
			}
		})
	}
}

// Slurm 22.05 reports the end of a job only to squeue.
func TestJobEnd(t *testing.T) {
	at := time.Unix(1_800_000_000, 0)
	for _, c := range []struct {
		said string
		end  time.Time
		says string // of the error; empty: none
	}{
		{"7 1800000000 1:00:00\n", at, ""},
		{"9 1700000000 10:00\n8 N/A 10:00\n7 1800000000 10:00\n", at, ""}, // of an array
		{"7 1831536000 UNLIMITED\n", time.Time{}, ""},
		{"7 N/A 1:00:00\n", at, `its end is "N/A" and its time limit "1:00:00"`},
		{"7 Unknown NOT_SET\n", at, `its end is "Unknown"`},
		{"7 NONE 10:00\n", at, `its end is "NONE"`},
		{"77 1800000000 1:00:00\n", at, "it is not in"},
		{"", at, `it is not in ""`},
	} {
		end, err := jobEnd(c.said, "7")
		if c.says != "" {
			if err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("%q: error %v, want %q", c.said, err, c.says)
			}
			continue
		}
		if err != nil || !end.Equal(c.end) {
			t.Errorf("%q: %v, %v, want %v", c.said, end, err, c.end)
		}
	}
}

// A Slurm job on a machine without Slurm's commands, and a controller that
// refuses, are distinguished from a job without an end.
func TestSqueueFails(t *testing.T) {
	t.Setenv(slurmEnd, "")
	t.Setenv(slurmJob, "7")
	t.Setenv("PATH", t.TempDir())
	if _, err := deadline(t.Context(), "auto", time.Now()); err == nil || !strings.Contains(err.Error(), "squeue does not report when job 7 ends") || !strings.Contains(err.Error(), "executable file not found") || !strings.Contains(err.Error(), "give a duration such as 4h") {
		t.Errorf("error %v", err)
	}
}
