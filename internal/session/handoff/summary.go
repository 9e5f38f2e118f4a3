package handoff

import (
	"cmp"
	"encoding/json"
	"maps"
	"math"
	"reflect"
	"slices"
	"time"

	"github.com/ckptstore/ckptstore/events"
)

// merge builds the iteration's event: rank 0's metrics are the trial's. Other
// ranks are listed where they differ, or summarized in a large group.
func merge(attempt, iteration int, got []delivery, took time.Duration) *events.Metrics {
	m := &events.Metrics{
		Attempt: attempt, Iteration: iteration, Step: got[0].Step,
		Metrics: got[0].Metrics, Seconds: took.Seconds(),
	}
	if got[0].took != nil {
		m.Seconds = *got[0].took
	}
	m.Slowest = slowest(got)
	if len(got) > exactRanks {
		m.Summary, m.Others = summarize(got)
		return m
	}
	for rank, d := range got[1:] {
		if !reflect.DeepEqual(d.Metrics, m.Metrics) {
			m.Others = append(m.Others, events.RankMetrics{Rank: rank + 1, Metrics: d.Metrics})
		}
	}
	return m
}

// slowest returns the last of several ranks to report, the lowest of equals.
func slowest(got []delivery) *events.SlowestRank {
	if len(got) < 2 {
		return nil
	}
	begin, last := 0, 0
	for rank, d := range got {
		if d.at.Before(got[begin].at) {
			begin = rank
		}
		if d.at.After(got[last].at) {
			last = rank
		}
	}
	return &events.SlowestRank{Rank: last, Late: *events.Seconds(got[last].at.Sub(got[begin].at))}
}

// Bounds of an iteration's event in a large group.
const (
	exactRanks     = 1024      // largest group whose event has the metrics of each rank
	mostOutliers   = 32        // ranks that the event of a larger one lists
	outlierSigmas  = 3         // standard deviations from the mean beyond which a rank is one
	summarizedText = 128 << 10 // bytes of the names of the metrics that it summarizes
)

// summarize returns each numeric metric over all ranks, and the ranks that are furthest
// from the mean in one of them. Metrics of rank 0 come first if there are too many.
func summarize(got []delivery) (all []events.MetricSummary, outliers []events.RankMetrics) {
	names := slices.Sorted(maps.Keys(got[0].Metrics))
	text := 0
	count := func(name string) {
		quoted, _ := json.Marshal(name) // a string cannot fail
		text += len(quoted) + rankSpare
	}
	for _, name := range names {
		count(name)
	}
	more := map[string]bool{}
	for _, d := range got[1:] {
		for name := range d.Metrics {
			if _, of0 := got[0].Metrics[name]; !of0 && !more[name] && text < summarizedText {
				more[name] = true
				count(name)
			}
		}
	}
	names = append(names, slices.Sorted(maps.Keys(more))...)
	far := make([]float64, len(got)) // standard deviations from the mean
	for _, name := range names {
		if s, ok := summaryOf(name, got, far); ok {
			all = append(all, s)
		}
	}
	var ranks []int
	for rank, by := range far {
		if rank > 0 && by > outlierSigmas {
			ranks = append(ranks, rank)
		}
	}
	slices.SortStableFunc(ranks, func(a, b int) int { return cmp.Compare(far[b], far[a]) })
	ranks = ranks[:min(len(ranks), mostOutliers)]
	slices.Sort(ranks)
	for _, rank := range ranks {
		outliers = append(outliers, events.RankMetrics{Rank: rank, Metrics: got[rank].Metrics})
	}
	return all, outliers
}

// summaryOf returns one metric over all ranks, unless it is no number on any. It raises
// the distance of each rank from the mean; that of NaN is infinite.
func summaryOf(name string, got []delivery, far []float64) (events.MetricSummary, bool) {
	s := events.MetricSummary{Name: name}
	least, most, sum, squares := math.Inf(1), math.Inf(-1), 0.0, 0.0
	for rank, d := range got {
		v, ok := number(d.Metrics[name])
		switch {
		case !ok:
			continue
		case math.IsNaN(v):
			s.NaNs++
			far[rank] = math.Inf(1)
			continue
		}
		if s.Ranks == 0 || v < least {
			least, s.MinOf = v, rank
		}
		if s.Ranks == 0 || v > most {
			most, s.MaxOf = v, rank
		}
		s.Ranks++
		delta := v - sum // sum is the mean so far
		sum += delta / float64(s.Ranks)
		squares += delta * (v - sum)
	}
	if s.Ranks == 0 {
		return s, s.NaNs > 0
	}
	s.Min, s.Max, s.Mean = loggable(least), loggable(most), loggable(sum)
	deviation := math.Sqrt(squares / float64(s.Ranks))
	for rank, d := range got {
		v, ok := number(d.Metrics[name])
		if by := math.Abs(v-sum) / deviation; ok && (by > far[rank] || math.IsInf(v, 0)) {
			far[rank] = max(by, far[rank])
			if math.IsInf(v, 0) {
				far[rank] = math.Inf(1)
			}
		}
	}
	return s, true
}

// nonFinites are the numbers that JSON has no form for, by their names in the log.
var nonFinites = map[string]float64{"NaN": math.NaN(), "Infinity": math.Inf(1), "-Infinity": math.Inf(-1)}

// number returns the value of a metric if it is a number.
func number(metric any) (v float64, ok bool) {
	switch m := metric.(type) {
	case float64:
		return m, true
	case string:
		v, ok = nonFinites[m]
		return v, ok
	}
	return 0, false
}

// loggable returns a number in the form of the log.
func loggable(v float64) any {
	switch {
	case math.IsNaN(v):
		return "NaN"
	case math.IsInf(v, 1):
		return "Infinity"
	case math.IsInf(v, -1):
		return "-Infinity"
	}
	return v
}
