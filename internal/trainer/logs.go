package trainer

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/launch/logs"
	"github.com/ckptstore/ckptstore/internal/slurm"
	"github.com/ckptstore/ckptstore/internal/store"
)

// logsOptions configure where the workers' output goes.
type logsOptions struct {
	logDir     string
	logMaxSize string
	redirects  string
	tee        string
	shown      string

	launchFlags []string // all flags of the trainer, as given
}

func (o *logsOptions) flags(f *pflag.FlagSet) {
	f.StringVar(&o.logDir, "log-dir", "", "keep the workers' output below this directory (default: STORE/logs)")
	f.StringVar(&o.logMaxSize, "log-max-size", "64MiB", "size at which an output file is rotated; the previous file is kept as .1")
	f.StringVarP(&o.redirects, "redirects", "r", "0", "outputs that go to files instead of the terminal: 0 none, 1 stdout, 2 stderr, 3 both, or LOCAL_RANK:N pairs such as 0:3,1:2")
	f.StringVarP(&o.tee, "tee", "t", "3", "outputs that go to both, in the form of --redirects (with --redirects: 0)")
	f.StringVar(&o.shown, "local-ranks-filter", "", "on the terminal, show only the output of these local ranks, such as 0,1")
}

// noteFlags records the given flags, in normal form, without --store.
func (o *logsOptions) noteFlags(f *pflag.FlagSet) {
	if o.redirects != "0" && !f.Changed("tee") {
		o.tee = "0"
	}
	f.Visit(func(flag *pflag.Flag) {
		if flag.Name == "store" {
			return // readers of the log know the store, and its URL may have a password
		}
		if strings.HasPrefix(flag.Name, "http") || flag.Name == "annotate-pod" || flag.Name == "traces" {
			return // an address, files, the pod or the environment of this machine, for this job only
		}
		values := []string{flag.Value.String()}
		if list, ok := flag.Value.(pflag.SliceValue); ok {
			values = list.GetSlice()
		}
		for _, v := range values {
			o.launchFlags = append(o.launchFlags, "--"+flag.Name+"="+v)
		}
	})
}

// routes parses the flags.
func (o *logsOptions) routes() (r logs.Routes, size int64, err error) {
	bad := func(flag string, err error) (logs.Routes, int64, error) {
		return logs.Routes{}, 0, fmt.Errorf("%w: --%s %w", launch.ErrConfig, flag, err)
	}
	if r.Redirects, err = logs.ParsePerRank(o.redirects); err != nil {
		return bad("redirects", err)
	}
	if r.Tee, err = logs.ParsePerRank(o.tee); err != nil {
		return bad("tee", err)
	}
	if o.shown != "" {
		for text := range strings.SplitSeq(o.shown, ",") {
			rank, err := strconv.Atoi(strings.TrimSpace(text))
			if err != nil || rank < 0 {
				return bad("local-ranks-filter", fmt.Errorf("%q: give local ranks, such as 0,1", o.shown))
			}
			r.Shown = append(r.Shown, rank)
		}
	}
	if size, err = parseSize(o.logMaxSize); err != nil {
		return bad("log-max-size", err)
	}
	return r, size, nil
}

// leastLog is the minimum size of an output file: a smaller file has no room even
// for one line.
const leastLog = 64 << 10

// parseSize reads a number of bytes such as 64MiB.
func parseSize(text string) (int64, error) {
	number, unit := text, int64(1)
	for i, name := range []string{"KiB", "MiB", "GiB"} {
		if n, ok := strings.CutSuffix(text, name); ok {
			number, unit = n, 1<<(10*(i+1))
		}
	}
	n, err := strconv.ParseInt(strings.TrimSpace(number), 10, 64)
	if err != nil || n > 1<<50/unit || n*unit < leastLog {
		return 0, fmt.Errorf("%q: give a size of 64KiB or more, such as 64MiB", text)
	}
	return n * unit, nil
}

// launch fills in how the job was launched and where its output goes.
func (o *logsOptions) launch(cfg *launch.Config) (err error) {
	if cfg.Output.Routes, cfg.Output.MaxSize, err = o.routes(); err != nil {
		return err
	}
	nproc := len(cfg.Local())
	for _, rank := range cfg.Output.Routes.Shown {
		if rank >= nproc {
			return fmt.Errorf("%w: --local-ranks-filter %s: there is no local rank %d among %d; give ranks from 0 to %d", launch.ErrConfig, o.shown, rank, nproc, nproc-1)
		}
	}
	cfg.Launch.Flags = slices.Clone(o.launchFlags)
	cfg.Launch.SlurmJob, cfg.Launch.SlurmRestarts = slurm.Job()
	if cfg.Launch.Dir, err = os.Getwd(); err != nil {
		return fmt.Errorf("find the working directory: %w", err)
	}
	return nil
}

// place sets where the files of a job are, once its store is open.
func (o *logsOptions) place(st *store.Store, cfg *launch.Config) error {
	below := logs.Below(checkpoint.RefOf(cfg.Run, "", "").Run, cfg.Job)
	if o.logDir == "" && st.Dir() == "" {
		cfg.Logger.Info("the workers' output is not kept: the store has no directory; --log-dir names one")
		return nil
	}
	if o.logDir == "" {
		cfg.Output.Top, cfg.Output.Dir, cfg.Output.Recorded = st.Dir(), filepath.Join(st.Dir(), below), below
		return nil
	}
	dir, err := filepath.Abs(o.logDir)
	if err != nil {
		return fmt.Errorf("--log-dir: %w", err)
	}
	cfg.Output.Top = dir
	dir = filepath.Join(dir, strings.TrimPrefix(below, "logs/"))
	cfg.Output.Dir, cfg.Output.Recorded = dir, dir
	return nil
}
