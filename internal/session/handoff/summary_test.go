package handoff

import (
	"encoding/json"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
)

// The report of a large group has rank 0's metrics, a summary of all ranks, and the ranks
// that are far from the others.
func TestLargeReportIsSummarized(t *testing.T) {
	t.Parallel()
	const world = 16_384
	got := make([]delivery, world)
	for rank := range got {
		got[rank] = delivery{rank: rank, Report: client.Report{Step: 3, Metrics: map[string]any{
			"loss": 2 + 0.001*float64(rank%7), "phase": "warm-up", "time": 1.0,
		}}}
	}
	got[5].Metrics["loss"] = "NaN"
	got[6].Metrics["loss"] = 900.0
	got[7].Metrics["time"] = 9.5
	got[8].Metrics["extra"] = 1.0
	got[9].Metrics["time"] = "oops"
	got[0].Metrics["time"] = "Infinity"
	m := merge(1, 4, got, time.Second)
	text, err := json.Marshal(m)
	if err != nil || len(text) > 2<<10 {
		t.Fatalf("%d bytes, %v", len(text), err)
	}
	summary := map[string]events.MetricSummary{}
	for _, s := range m.Summary {
		summary[s.Name] = s
	}
	loss := summary["loss"]
	if loss.Ranks != world-1 || loss.NaNs != 1 || loss.Min != 2.0 || loss.MinOf != 0 || loss.Max != 900.0 || loss.MaxOf != 6 || math.Abs(loss.Mean.(float64)-2.0578) > 0.001 {
		t.Errorf("loss %+v", loss)
	}
	if s := summary["time"]; s.Max != "Infinity" || s.MaxOf != 0 || s.Min != 1.0 || s.Ranks != world-1 {
		t.Errorf("time %+v", s)
	}
	if s := summary["extra"]; s.Ranks != 1 || s.Mean != 1.0 || s.MinOf != 8 {
		t.Errorf("extra %+v", s)
	}
	if _, listed := summary["phase"]; listed {
		t.Error("a text is summarized")
	}
	var ranks []int
	for _, o := range m.Others {
		ranks = append(ranks, o.Rank)
	}
	if fmt.Sprint(ranks) != "[5 6]" { // the mean of time is infinite: no rank is far from it
		t.Errorf("outliers %v", ranks)
	}
	if _, exact := summarizedOf(t, got[:exactRanks]); exact != exactRanks-1 {
		t.Errorf("%d ranks are listed in a group of %d", exact, exactRanks)
	}
}

func summarizedOf(t *testing.T, got []delivery) (summaries, others int) {
	t.Helper()
	m := merge(1, 4, got, time.Second)
	return len(m.Summary), len(m.Others)
}

// The largest reports that a group may make fit in an event, however large the group is.
func TestReportsFitAnEvent(t *testing.T) {
	t.Parallel()
	for _, world := range []int{1, 8, exactRanks, exactRanks + 1, 16_384} {
		limit := ReportLimit(world)
		if limit < 512 {
			t.Fatalf("%d bytes each of %d ranks", limit, world)
		}
		got := make([]delivery, world)
		for rank := range got {
			metrics := map[string]any{"loss": float64(rank % 50)}
			if world <= exactRanks || rank < 40 || rank%(world/40+1) == 0 { // the others would only take time
				for size := 64; size < limit-512; size += 64 {
					metrics[fmt.Sprintf("r%06d.%06d.\x01%s", rank, size, strings.Repeat("x", 16))] = math.Pow(float64(rank), 9) + 0.123456789
				}
			}
			if err := CheckMetrics(metrics, world); err != nil {
				t.Fatal(err)
			}
			got[rank] = delivery{rank: rank, Report: client.Report{Metrics: metrics}}
		}
		text, err := json.Marshal(merge(1, 4, got, time.Second))
		if err != nil || len(text) > maxEvent-1024 {
			t.Errorf("the event of %d ranks has %d bytes, %v", world, len(text), err)
		}
	}
}

// An iteration of many ranks ends when the last one has reported.
func TestHandoffOfManyRanks(t *testing.T) {
	t.Parallel()
	const world = 2_000 // with two goroutines each: the race detector allows 8,128
	d := openDesk(t.Context(), world)
	var answers []<-chan error
	for rank := range world {
		answers = append(answers, d.reports(t, rank, 0, 1, map[string]any{"loss": 1.0}))
	}
	for rank, answer := range answers {
		if err := <-answer; err != nil {
			t.Fatalf("rank %d: %v", rank, err)
		}
	}
	for rank := range world {
		d.Ended(rank)
	}
	if err := <-d.end; err != nil || d.n != 1 || len(d.said[0].Others) > 0 || d.said[0].Summary[0].Ranks != world {
		t.Errorf("%d iterations, %v", d.n, err)
	}
}
