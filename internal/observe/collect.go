package observe

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/ckptstore/ckptstore/internal/insight"
	"github.com/ckptstore/ckptstore/internal/otlp"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

// checked is the live job of a run at a time, as its lease shows it.
type checked struct {
	job string // empty: none
	at  time.Time
}

// liveFor is how long a verdict about a lease holds. That of a dead job holds longer: a store may
// have thousands.
const (
	liveFor = 5 * time.Second
	deadFor = time.Minute
)

// collect reads the store, or returns the metrics of a moment ago.
func (c *collector) collect(ctx context.Context) ([]prometheus.Metric, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if now := c.options.Now(); c.last != nil && now.Sub(c.at) >= 0 && now.Sub(c.at) < fresh {
		return c.last, nil
	}
	b := &builder{}
	if err := c.read(ctx, b); err != nil {
		return nil, err
	}
	c.last, c.at = b.metrics, c.options.Now()
	return c.last, nil
}

func (c *collector) read(ctx context.Context, b *builder) error {
	h := c.store.Health(ctx)
	b.gauge(buildInfo, 1, c.options.Version)
	b.gauge(storeInfo, 1, c.store.ID)
	if c.options.Traces != nil {
		b.traces(c.options.Traces.Counts())
	}
	b.gauge(owner, bit(h.Owns))
	if h.LogErr == nil {
		b.gauge(logLast, float64(h.Log))
	}
	if !h.Owns {
		return nil
	}
	b.ofStore(h)
	if h.Halted != nil { // no query is answered
		b.gauge(complete, 0)
		return nil
	}
	// Views that are behind answer later, and a scrape does not wait: their lag is known.
	whole := h.LogErr
	if whole == nil {
		whole = errors.Join(c.cursors(ctx, b, h.Log), c.runs(ctx, b))
	}
	if whole != nil {
		c.options.Logger.Warn("metrics of runs or cursors not collected", "error", whole)
	}
	b.gauge(complete, bit(whole == nil))
	return nil
}

// traces adds what this process has sent to a collector.
func (b *builder) traces(n otlp.Counts) {
	b.counter(tracesSent, float64(n.Sent))
	b.gauge(tracesWaiting, float64(n.Waiting))
	for _, reason := range otlp.Reasons {
		b.counter(tracesDropped, float64(n.Dropped[reason]), reason)
	}
}

// ofStore adds what the store itself knows.
func (b *builder) ofStore(h store.Health) {
	if h.LogErr == nil {
		b.gauge(viewsLag, float64(h.Log-min(h.Log, h.Views)))
	}
	b.gauge(viewsHalted, bit(h.Halted != nil))
	b.gauge(scrubSequence, float64(h.Read.Sequence))
	findings := 0
	if h.Read.Damage != nil {
		findings = len(h.Read.Damage.Findings)
	}
	b.gauge(scrubFindings, float64(findings))
	for _, v := range h.Disks {
		b.gauge(diskFree, float64(v.Free), v.Name)
		b.gauge(diskSize, float64(v.Size), v.Name)
	}
}

func (c *collector) cursors(ctx context.Context, b *builder, last uint64) error {
	list, err := c.store.Log.ListCursors(ctx)
	if err != nil {
		return err
	}
	for _, of := range list[:min(len(list), maxCursors)] {
		if of.Damage == nil {
			b.gauge(cursorLag, float64(last-min(last, of.Sequence)), of.Name)
		}
	}
	return nil
}

// runs adds the metrics of runs that are live or were in the last hour: first the live ones, then
// the newest.
func (c *collector) runs(ctx context.Context, b *builder) error {
	rows, ok := c.store.Views().(query.Rows)
	if !ok {
		return nil
	}
	return c.list(ctx, b, rows)
}

// list is runs for rows of this process.
func (c *collector) list(ctx context.Context, b *builder, rows query.Rows) error {
	var all []projections.RunStanding
	here, err := rows.Read(ctx, func(r projections.Reader) (err error) {
		all, err = projections.Activities(r)
		return err
	})
	if err != nil || !here {
		return err
	}
	listed, err := c.choose(ctx, all)
	if err != nil {
		return err
	}
	var standings []projections.RunStanding
	here, err = rows.Read(ctx, func(r projections.Reader) error {
		standings = make([]projections.RunStanding, 0, min(len(listed), MaxRuns))
		for _, a := range listed[:min(len(listed), MaxRuns)] {
			if projections.Understood(r, a.Run.Name) != nil {
				continue // its rows are of a newer version of the program
			}
			s, err := projections.GetRunStanding(r, a.Run.Name)
			if err != nil {
				return err
			}
			standings = append(standings, s)
		}
		return nil
	})
	if err != nil || !here {
		return err
	}
	shown := 0
	devices := map[[2]string]bool{}
	for _, s := range standings {
		of := &builder{}
		of.run(s, c.live[s.Run.Name].job, devices)
		if b.series+of.series >= MaxSeries {
			break
		}
		b.metrics, b.series = append(b.metrics, of.metrics...), b.series+of.series
		shown++
	}
	b.gauge(runsOmitted, float64(len(listed)-shown))
	return nil
}

// choose returns the runs to list, in their order. It asks for the leases of jobs that have not
// ended.
func (c *collector) choose(ctx context.Context, all []projections.RunStanding) (listed []projections.RunStanding, err error) {
	now := c.options.Now()
	live := map[string]checked{}
	for _, a := range all {
		is := checked{}
		if a.Run.Job != "" && !a.Job.Ended {
			if is, err = c.holder(ctx, a.Run.Name, now); err != nil {
				return nil, err
			}
			live[a.Run.Name] = is
		}
		if is.job != "" || now.Sub(a.HeardAt) <= recent {
			listed = append(listed, a)
		}
	}
	c.live = live
	slices.SortStableFunc(listed, func(x, y projections.RunStanding) int {
		return cmp.Or(cmp.Compare(bit(live[y.Run.Name].job != ""), bit(live[x.Run.Name].job != "")), y.HeardAt.Compare(x.HeardAt))
	})
	return listed, nil
}

// holder returns the live job of a run.
func (c *collector) holder(ctx context.Context, run string, now time.Time) (checked, error) {
	old, known := c.live[run]
	holds := liveFor
	if old.job == "" {
		holds = deadFor
	}
	if age := now.Sub(old.at); known && age >= 0 && age < holds {
		return old, nil
	}
	job, err := c.liveJob(ctx, run)
	if err != nil {
		return checked{}, fmt.Errorf("lease of run %q: %w", run, err)
	}
	return checked{job, now}, nil
}

// builder collects metrics.
type builder struct {
	metrics []prometheus.Metric
	series  int
}

func bit(is bool) float64 {
	if is {
		return 1
	}
	return 0
}

// label returns a value that a label can have.
func label(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }

func labels(values []string) []string {
	for i, v := range values {
		values[i] = label(v)
	}
	return values
}

func (b *builder) gauge(f family, value float64, values ...string) {
	b.metrics = append(b.metrics, prometheus.MustNewConstMetric(f.desc(), prometheus.GaugeValue, value, labels(values)...))
	b.series++
}

func (b *builder) counter(f family, value float64, values ...string) {
	b.metrics = append(b.metrics, prometheus.MustNewConstMetric(f.desc(), prometheus.CounterValue, value, labels(values)...))
	b.series++
}

func (b *builder) histogram(f family, s projections.Spread, values ...string) prometheus.Metric {
	buckets, sum := map[float64]uint64{}, uint64(0)
	for i, bound := range projections.SpreadBounds {
		sum += s.Counts[i]
		buckets[bound] = sum
	}
	b.series += len(buckets) + 3
	return prometheus.MustNewConstHistogram(f.desc(), sum+s.Counts[len(buckets)], s.Sum, buckets, labels(values)...)
}

// run adds the metrics of one run. live is the ID of its live job. devices are the GPUs that were
// added for other runs.
func (b *builder) run(s projections.RunStanding, live string, devices map[[2]string]bool) {
	name := s.Run.Name
	var trials []projections.Trial
	inFlight := 0
	for _, t := range s.Trials {
		trials = append(trials, t.Trial)
		inFlight += len(t.Open)
	}
	if s.Job.ID != "" {
		b.gauge(runState, 1, name, insight.StateOf(s.Job, live, trials))
		b.gauge(runJobStarted, unix(s.Job.StartedAt), name)
	}
	if t, ok := leading(s.Trials); ok {
		for _, n := range s.Job.Nodes {
			if live != "" && n.LeftAt.IsZero() && insight.IsSlow(n, t.Trial.Attempt) {
				b.gauge(nodeSlow, 1, name, strconv.Itoa(n.Node))
			}
		}
		if t.Step != nil {
			b.gauge(runStep, float64(*t.Step), name)
			b.gauge(runLastReport, unix(t.ReportedAt), name)
		}
		if k := insight.IfKilled(t); k.Steps != nil {
			b.gauge(stepsAtRisk, float64(*k.Steps), name)
		}
	}
	if !s.Tally.LastCommitAt.IsZero() {
		b.gauge(runLastCommit, unix(s.Tally.LastCommitAt), name)
	}
	if usual := insight.Interval(s.Tally); usual > 0 {
		b.gauge(commitInterval, usual.Seconds(), name)
	}
	u := s.Usage
	for use, seconds := range map[string]float64{"kept": u.Kept, "lost": u.Lost, "restoring": u.Restoring, "blocked": u.Blocked, "other": u.Other} {
		b.gauge(runTime, seconds, name, use)
	}
	b.gauge(savesInFlight, float64(inFlight), name)
	b.tally(name, s.Tally)
	for _, d := range s.Devices {
		at := [2]string{strconv.Itoa(d.Node), d.Device}
		if !d.Healthy && !devices[at] {
			devices[at] = true
			b.gauge(gpuUnhealthy, 1, at[0], at[1])
		}
	}
}

// alerting are the failures of attempts that every run has a series of, so that an increase from
// none is seen.
var alerting = []string{"worker", "infrastructure", "lost"}

// tally adds the totals of a run.
func (b *builder) tally(name string, t projections.Tally) {
	b.counter(saves, float64(t.Committed), name, "committed")
	b.counter(saves, float64(t.Aborted), name, "aborted")
	b.counter(saveBytes, float64(t.Written), name, "written")
	b.counter(saveBytes, float64(t.Reused), name, "reused")
	if t.Slowest != nil {
		b.gauge(slowestRank, float64(t.Slowest.Rank), name)
		b.gauge(slowestNode, float64(t.Slowest.Node), name)
	}
	total := b.histogram(saveDuration, t.Saving, name, "total")
	if id := label(t.LastCommit); t.LastSaving > 0 && utf8.RuneCountInString(id) < 64 {
		newest := prometheus.Exemplar{Value: t.LastSaving, Labels: prometheus.Labels{"checkpoint": id, "sequence": strconv.FormatUint(t.LastCommitSeq, 10)}, Timestamp: t.LastCommitAt}
		if with, err := prometheus.NewMetricWithExemplars(total, newest); err == nil {
			total = with
		}
	}
	b.metrics = append(b.metrics, total,
		b.histogram(saveDuration, t.Staging, name, "staged"), b.histogram(saveDuration, t.Blocking, name, "blocked"))

	failed := false
	for _, r := range t.Restores {
		if failed = failed || r.Failed; r.Failed {
			b.counter(restores, float64(r.Count), name, r.Tier, "failed")
			continue
		}
		b.counter(restores, float64(r.Count), name, r.Tier, "completed")
		b.metrics = append(b.metrics, prometheus.MustNewConstSummary(restoreTime.desc(), uint64(max(0, r.Count)), r.Sum, nil, labels([]string{name, r.Tier})...))
		b.series += 2
	}
	if !failed {
		b.counter(restores, 0, name, "none", "failed")
	}
	for _, failure := range alerting {
		b.counter(attempts, float64(t.Attempts[failure]), name, failure)
	}
	for failure, n := range t.Attempts {
		if !slices.Contains(alerting, failure) {
			b.counter(attempts, float64(n), name, failure)
		}
	}
}

// leading returns the trial that stands for a run: the trial of a plain run, or else the last to
// report.
func leading(trials []projections.Standing) (lead projections.Standing, ok bool) {
	for _, t := range trials {
		if t.Trial.Name == projections.DefaultTrial {
			return t, true
		}
		if !ok || t.ReportedAt.After(lead.ReportedAt) {
			lead, ok = t, true
		}
	}
	return lead, ok
}

// unix returns a time as seconds since 1970.
func unix(t time.Time) float64 { return math.Round(float64(t.UnixMilli())) / 1000 }
