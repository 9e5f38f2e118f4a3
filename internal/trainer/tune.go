package trainer

import (
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/ckptstore/ckptstore/gpu"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/session/staging"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/internal/tune"
)

const tuneHelp = `Train several trials of a run, each with its own configuration, and give the steps to
the best of them: by asynchronous successive halving (ASHA) or, with --scheduler pbt, by
population-based training (PBT). COMMAND is started for each trial as by trainer run, --slots of
them at once.

ASHA: each trial is trained for --grace-steps. Of the trials with a result there, the best of
each --reduction are trained --reduction times as long, and so on up to --max-steps: these
are the rungs. A free slot gets the best trial that may continue to the next rung, from the
highest rung that has one, or else a new trial. A trial that has to wait is asked to save
and end, as by ckptstore preempt; it continues from that checkpoint when its turn comes. So is
a trial that reports --max-steps: its last save is the result. A step is what workers report
as one, and --metric is a metric of those reports. A report beyond the steps of a rung counts
there, at its own step. Values that are no finite numbers are worse than all others.

PBT: all trials are trained for --perturb-every steps, report and save. Then the share --quantile
of them with the worst values end. Each is replaced by a clone of one of as many best ones, drawn at
random: a new trial, t03-1 in the place of t03, forked from that trial's checkpoint without a copy
of its bytes. The clone has that trial's configuration, in which each of the names --perturb
changes: with the probability --resample it is drawn again, else a number is multiplied by one of
--factors and kept in its domain, and a value of a list is replaced by a neighbor. When all trials
have an interval, the next one begins, up to --max-steps.

  trainer tune --name mnist --trials 64 --slots 4 --search space.json \
      --metric loss --max-steps 240 -- python3 train.py --lr {lr}
  trainer tune --name pop --trials 8 --slots 4 --search space.json --scheduler pbt \
      --perturb lr,noise --perturb-every 40 --max-steps 240 -- python3 train.py

--search names a JSON file with a value or a domain for each name:

  {"lr": {"loguniform": [1e-4, 1e-1]}, "noise": {"uniform": [0, 0.3]},
   "layers": {"integer": [1, 4]}, "act": {"choice": ["tanh", "relu"]},
   "batch": {"grid": [32, 64, 128]}, "epochs": 3}

Trials go through the combinations of all grids in order; all else is drawn at random, by
--seed and the trial's number. The trial's configuration is what workers get as its
config, with the values of --set; {NAME} in COMMAND is replaced by its value. An argument or an
option's value that is {NAME} alone, of a name that the file does not have, is an error.

The search and its decisions are events of the log, and follow from the reports in it
alone. A tuner that was killed continues with the same command: it decides as if it had not
been killed, finishes the saves that were in shared memory, and starts no trial again that has
saved its steps. A trial that has --max-steps, or the steps of an interval of PBT, and no
checkpoint of them repeats them. Trials that
failed stay errored, except with --retry-errored. If the first 3 trials fail in the same way and
none has reported, the search ends. ckptstore trials RUN shows the trials and
checks that each decision follows from the log; RUN/TRIAL is a reference in every other command.

The search exits with 1 if the last save of a trial was lost; the other trials are trained.
Checkpoints are kept until removed: see ckptstore gc. If a search is not continued after its tuner
was killed, ckptstore gc --staging frees the shared memory of its trials.

The GPUs are divided among the slots in order. Without --staging-memory, the
shared memory is, too. The workers' output goes to stderr with the trial in front, and to files that
ckptstore logs RUN --trial TRIAL reads; stdout has the trials at the end. ckptstore stop RUN and ckptstore preempt RUN end all trials, and so do
signals.

` + supervisionHelp

// tuneOptions are the flags of a search.
type tuneOptions struct {
	search    string
	metric    string
	mode      string
	trials    int
	slots     int
	seed      int64
	grace     int64
	reduction int
	maxSteps  int64
	json      bool
	retry     bool

	// Of population-based training.
	scheduler string
	every     int64
	quantile  float64
	resample  float64
	factors   []float64
	perturb   []string
	given     func(flag string) bool // whether the command line has a flag; nil: none
}

// Schedulers of a search, as flags name them.
const asha = "asha"

// flagsOf are the flags of one scheduler alone.
var flagsOf = map[string][]string{
	asha:     {"grace-steps", "reduction"},
	tune.PBT: {"perturb-every", "quantile", "resample", "factors", "perturb"},
}

// schedule sets what a definition has of its scheduler.
func (s tuneOptions) schedule(d *tune.Definition) error {
	for of, flags := range flagsOf {
		for _, name := range flags {
			if of != s.scheduler && s.given != nil && s.given(name) {
				return fmt.Errorf("%w: --%s: it is of --scheduler %s, and this is %s: leave one of them out", launch.ErrConfig, name, of, s.scheduler)
			}
		}
	}
	switch s.scheduler {
	case asha:
		if s.reduction < 2 {
			return fmt.Errorf("%w: --reduction %d: give 2 or more", launch.ErrConfig, s.reduction)
		}
		if d.Reduction, d.Grace = s.reduction, s.grace; d.Grace == 0 {
			d.Grace = max(1, s.maxSteps/int64(s.reduction)/int64(s.reduction))
		}
	case tune.PBT:
		if s.every < 1 {
			return fmt.Errorf("%w: --perturb-every %d: give the steps of an interval", launch.ErrConfig, s.every)
		}
		d.Scheduler, d.Every, d.Quantile = tune.PBT, s.every, s.quantile
		d.Exploration = tune.Exploration{Resample: s.resample, Factors: s.factors, Perturb: slices.Sorted(slices.Values(s.perturb))}
		if len(s.perturb) == 0 {
			d.Perturb = d.Space.Random()
		}
	default:
		return fmt.Errorf("%w: --scheduler %q: give %s or %s", launch.ErrConfig, s.scheduler, asha, tune.PBT)
	}
	return nil
}

func tuneCommand(std console.Streams, signals *stopSignals, p Parts) *cobra.Command {
	o := runOptions{use: "tune", signals: signals, parts: p, backendOptions: backendOptions{known: p.Backends}, resume: "auto"}
	o.nodesOptions.flags(pflag.NewFlagSet("", pflag.ContinueOnError)) // their defaults: a tuner has one node
	var s tuneOptions
	c := &cobra.Command{
		Use:   "tune [flags] -- COMMAND [ARG...]",
		Short: "Train several trials of a run and give the steps to the best of them",
		Long:  tuneHelp,
		RunE: func(c *cobra.Command, args []string) error {
			if c.Flags().Changed("name") && o.name == "" {
				return fmt.Errorf("%w: --name is empty; give the run a name, or leave the flag out", launch.ErrConfig)
			}
			o.noteSharing(c.Flags())
			if err := o.defaults(c.Flags(), os.LookupEnv); err != nil {
				return err
			}
			o.noteFlags(c.Flags())
			s.given = c.Flags().Changed
			return tuneJob(c.Context(), std, o, s, args)
		},
	}
	f := c.Flags()
	o.groupFlags(f)
	f.StringVar(&s.search, "search", "", "JSON file with the search space")
	f.StringVar(&s.metric, "metric", "loss", "metric of the reports by which trials are compared")
	f.StringVar(&s.mode, "mode", tune.Min, "which values of the metric are better: min or max")
	f.IntVar(&s.trials, "trials", 0, "number of trials (default: the combinations of the grids)")
	f.IntVar(&s.slots, "slots", 1, "trials that are trained at once")
	f.Int64Var(&s.seed, "seed", 1, "of the random draws")
	f.Int64Var(&s.grace, "grace-steps", 0, "steps that each trial is trained (default: --max-steps divided by --reduction twice, at least 1)")
	f.IntVar(&s.reduction, "reduction", 4, "of this many trials on a rung, one is trained further")
	f.Int64Var(&s.maxSteps, "max-steps", 0, "steps of the last rung: a trial is asked to save and end at its first report of this step or a later one")
	f.StringVar(&s.scheduler, "scheduler", asha, "asha, or pbt for population-based training")
	f.Int64Var(&s.every, "perturb-every", 0, "pbt: steps of an interval, after which the worst trials are replaced")
	f.Float64Var(&s.quantile, "quantile", 0.25, "pbt: share of the trials that are replaced, and of those that are cloned; 0 to 0.5, rounded up")
	f.Float64Var(&s.resample, "resample", 0.25, "pbt: probability that a value is drawn again from its domain")
	f.Float64SliceVar(&s.factors, "factors", []float64{1.2, 0.8}, "pbt: a number that is not drawn again is multiplied by one of these, chosen at random")
	f.StringSliceVar(&s.perturb, "perturb", nil, "pbt: names of the search space that change in a clone (default: all that are drawn at random)")
	f.BoolVar(&s.retry, "retry-errored", false, "start the trials again that failed in earlier jobs of the search")
	f.BoolVar(&s.json, "json", false, "print the trials as one JSON object at the end")
	return c
}

// definition returns what the flags search for.
func (s tuneOptions) definition() (d tune.Definition, err error) {
	bad := func(format string, args ...any) (tune.Definition, error) {
		return tune.Definition{}, fmt.Errorf("%w: %s", launch.ErrConfig, fmt.Sprintf(format, args...))
	}
	if s.slots < 1 {
		return bad("--slots %d: give 1 or more", s.slots)
	}
	if s.search == "" {
		return bad("--search is missing: name a file with the search space, such as {\"lr\": {\"loguniform\": [1e-4, 1e-1]}}")
	}
	if s.maxSteps < 1 {
		return bad("--max-steps %d: give the most steps that a trial is trained", s.maxSteps)
	}
	file, err := os.Open(s.search)
	if err != nil {
		return bad("--search: %s", err)
	}
	defer func() { _ = file.Close() }()
	text, err := io.ReadAll(io.LimitReader(file, mostSpace+1))
	if err != nil {
		return bad("--search: %s", err)
	}
	if len(text) > mostSpace {
		return bad("--search %s: a search space has at most %d bytes", s.search, mostSpace)
	}
	space, err := tune.ReadSpace(text)
	if err != nil {
		return d, fmt.Errorf("--search %s: %w", s.search, err)
	}
	if s.trials == 0 && space.Cells() == 1 {
		return bad("--trials is missing: the search space has no grid from which their number follows")
	}
	d = tune.Definition{Metric: s.metric, Mode: s.mode, Trials: s.trials, Seed: s.seed, MaxSteps: s.maxSteps, Finite: true, Space: space}
	if d.Trials == 0 {
		d.Trials = space.Cells()
	}
	if err := s.schedule(&d); err != nil {
		return d, err
	}
	return tune.Define(*d.Body(""))
}

// mostSpace bounds the file of a search space, in bytes: the log has it in one event.
const mostSpace = 128 << 10

// tuneJob runs a search.
func tuneJob(ctx context.Context, std console.Streams, o runOptions, s tuneOptions, args []string) error {
	log := newLogger(std.Err, o.quiet)
	d, err := s.definition()
	if err != nil {
		return err
	}
	where, err := o.placed(os.Getenv)
	if err != nil {
		return err
	}
	if where.max > 1 {
		return fmt.Errorf("%w: %s: a search runs on one node; start it there alone, with --nnodes 1", launch.ErrConfig, where.said)
	}
	cfg, err := o.prepare(ctx, std, args, log)
	if err != nil {
		return err
	}
	if err := d.Space.Check(cfg.Command); err != nil {
		return err
	}
	slots, err := o.divide(ctx, thisMachine(), s.slots)
	if err != nil {
		return err
	}
	if o.stagingMemory == "" {
		cfg.StagingMemory = staging.Memory{Percent: max(1, staging.DefaultMemory.Percent/s.slots)}
	}
	return o.opened(ctx, cfg, store.Options{Location: o.store, Patience: o.wait, Logger: log}, func(ctx context.Context, st *store.Store, cfg launch.Config) error {
		return leased(ctx, st, cfg, holdRun, func(ctx context.Context) error {
			t := newTuner(st, cfg, d, slots, o.parts.Storage)
			t.retry = s.retry
			board, err := t.run(ctx)
			if board == nil {
				return err
			}
			if perr := printBoard(std.Out, *board, s.json); err == nil {
				err = perr
			}
			return err
		})
	})
}

// slot is what one trial at a time is trained on.
type slot struct {
	workers int
	devices launch.BackendConfig
}

// divide divides the GPUs and cores that the workers may use among slots.
func (o *runOptions) divide(ctx context.Context, m machine, slots int) ([]slot, error) {
	var all []gpu.Device
	if o.gpusPerWorker != "0" {
		all, _ = m.devices(ctx) // config has reported why there are none
	}
	each := len(all) / slots
	if each == 0 && len(all) > 0 {
		return nil, fmt.Errorf("%w: --slots %d: there are %d GPUs; give at most one slot for each, or --gpus-per-worker 0", launch.ErrConfig, slots, len(all))
	}
	out := make([]slot, slots)
	for i := range out {
		part := machine{
			cores: max(1, m.cores/slots), visible: func() (string, bool) { return "", false },
			list: func(context.Context) ([]gpu.Device, error) {
				if each == 0 {
					return nil, gpu.ErrNoDriver
				}
				return slices.Clone(all[i*each : (i+1)*each]), nil
			},
		}
		workers, devices, _, err := o.resolve(ctx, part, o.nproc)
		if err != nil {
			return nil, err
		}
		devices.Backends, devices.InitHook = o.parts.Backends, o.parts.InitHook
		out[i] = slot{workers, devices}
	}
	return out, nil
}

// printBoard prints the trials of a search.
func printBoard(to io.Writer, b tune.Board, asJSON bool) error {
	c := &console.Console{Out: to, Raw: to, Format: "table"}
	if asJSON {
		c.Format = "json"
	}
	return console.Emit(c, b, b.Trials, func(w *tabwriter.Writer, _ bool) {
		for _, cells := range b.Table() {
			console.Row(w, cells...)
		}
	})
}
