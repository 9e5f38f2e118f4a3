package trainer

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/gpu"
	"github.com/ckptstore/ckptstore/internal/launch"
)

// TestDivide: the slots of a search have different GPUs, and share the cores.
func TestDivide(t *testing.T) {
	gpus := func(n int) machine {
		m := machine{cores: 8, visible: func() (string, bool) { return "", false }}
		m.list = func(context.Context) ([]gpu.Device, error) {
			if n == 0 {
				return nil, gpu.ErrNoDriver
			}
			var all []gpu.Device
			for i := range n {
				all = append(all, gpu.Device{UUID: fmt.Sprint("GPU-", i), Index: i})
			}
			return all, nil
		}
		return m
	}
	for _, c := range []struct {
		gpus, slots int
		nproc       string
		each        string
		want        string // of each slot: workers, GPUs of each, and its GPUs
	}{
		{4, 2, "1", "auto", "1x2 GPU-0 GPU-1; 1x2 GPU-2 GPU-3"},
		{4, 2, "gpu", "auto", "2x1 GPU-0 GPU-1; 2x1 GPU-2 GPU-3"},
		{4, 3, "1", "auto", "1x1 GPU-0; 1x1 GPU-1; 1x1 GPU-2"},
		{1, 2, "1", "auto", "give at most one slot for each"},
		{1, 2, "1", "0", "1x0; 1x0"},
		{2, 2, "2", "1", "bad configuration"},
		{0, 2, "cpu", "auto", "4x0; 4x0"},
		{0, 2, "3", "auto", "3x0; 3x0"},
	} {
		o := runOptions{}
		o.nproc, o.gpusPerWorker, o.backend = c.nproc, c.each, "none"
		slots, err := o.divide(t.Context(), gpus(c.gpus), c.slots)
		var got []string
		for _, s := range slots {
			text := fmt.Sprintf("%dx%d", s.workers, s.devices.GPUsPerWorker)
			for _, d := range s.devices.Devices {
				text += " " + d.UUID
			}
			got = append(got, text)
		}
		if err != nil {
			got = []string{err.Error()}
			if !errors.Is(err, launch.ErrConfig) {
				t.Errorf("%+v: %v is no configuration error", c, err)
			}
		}
		if text := strings.Join(got, "; "); text != c.want && (err == nil || !strings.Contains(text, c.want)) {
			t.Errorf("%d GPUs, %d slots, --nproc %s, --gpus-per-worker %s: %s, want %s", c.gpus, c.slots, c.nproc, c.each, text, c.want)
		}
	}
}

// TestDefinition: what the flags leave out follows from the others.
func TestDefinition(t *testing.T) {
	file := filepath.Join(t.TempDir(), "space.json")
	if err := os.WriteFile(file, []byte(`{"a": {"grid": [1, 2, 3]}, "b": {"grid": [1, 2]}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	given := tuneOptions{search: file, metric: "loss", mode: "min", slots: 1, scheduler: "asha", reduction: 4, maxSteps: 240}
	population := func(s *tuneOptions) {
		s.scheduler, s.every, s.quantile, s.resample, s.factors, s.perturb = "pbt", 20, 0.25, 0.25, []float64{1.2, 0.8}, []string{"b", "a"}
	}
	for _, c := range []struct {
		change func(*tuneOptions)
		trials int
		grace  int64
		bad    string
	}{
		{change: func(*tuneOptions) {}, trials: 6, grace: 15},
		{change: func(s *tuneOptions) { s.trials, s.grace = 4, 100 }, trials: 4, grace: 100},
		{change: func(s *tuneOptions) { s.maxSteps = 3 }, trials: 6, grace: 1},
		{change: func(s *tuneOptions) { s.slots = 0 }, bad: "--slots 0"},
		{change: func(s *tuneOptions) { s.reduction = 1 }, bad: "--reduction 1"},
		{change: func(s *tuneOptions) { s.grace = 241 }, bad: "241 steps for each trial"},
		{change: func(s *tuneOptions) { s.trials = -1 }, bad: "-1 trials"},
		{change: func(s *tuneOptions) { s.metric = "" }, bad: "no metric"},
		{change: func(s *tuneOptions) { s.search = file + "x" }, bad: "no such file"},
		{change: population, trials: 6},
		{change: func(s *tuneOptions) { s.scheduler = "bohb" }, bad: `--scheduler "bohb": give asha or pbt`},
		{change: func(s *tuneOptions) { population(s); s.every = 0 }, bad: "--perturb-every 0"},
		{change: func(s *tuneOptions) { population(s); s.every = 241 }, bad: "intervals of 241 steps: give 1 to the most steps, 240"},
		{change: func(s *tuneOptions) { population(s); s.maxSteps = 1e9; s.every = 1 }, bad: "more than 100000 intervals"},
		{change: func(s *tuneOptions) { population(s); s.trials = 1 }, bad: "a population of 1"},
		{change: func(s *tuneOptions) { population(s); s.quantile = 0.6 }, bad: "quantile 0.6"},
		{change: func(s *tuneOptions) { population(s); s.quantile = math.NaN() }, bad: "quantile NaN"},
		{change: func(s *tuneOptions) { population(s); s.resample = -1 }, bad: "probability -1"},
		{change: func(s *tuneOptions) { population(s); s.factors = []float64{1.2, 0} }, bad: "factor 0"},
		{change: func(s *tuneOptions) { population(s); s.factors = nil }, bad: "no factors"},
		{change: func(s *tuneOptions) { population(s); s.perturb = nil }, bad: "no value of the configuration changes"},
		{change: func(s *tuneOptions) { population(s); s.perturb = []string{"c"} }, bad: `"c" cannot change`},
		{change: func(s *tuneOptions) { population(s); s.given = func(flag string) bool { return flag == "reduction" } }, bad: "--reduction: it is of --scheduler asha"},
		{change: func(s *tuneOptions) { s.given = func(flag string) bool { return flag == "quantile" } }, bad: "--quantile: it is of --scheduler pbt"},
	} {
		s := given
		c.change(&s)
		d, err := s.definition()
		switch {
		case c.bad != "":
			if err == nil || !strings.Contains(err.Error(), c.bad) || exitCode(err) != 64 {
				t.Errorf("%+v: %v (exit code %d), want %q", s, err, exitCode(err), c.bad)
			}
		case err != nil || d.Trials != c.trials || d.Grace != c.grace:
			t.Errorf("%+v: %d trials of %d steps, %v", s, d.Trials, d.Grace, err)
		}
	}
}
