package handoff

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// Bounds of the metrics of an iteration, in bytes.
const (
	maxEvent   = 1 << 20  // limit of the log
	eventSpare = 16 << 10 // reserved for everything other than metrics
	rankSpare  = 64       // reserved in each rank's part
	maxReport  = 64 << 10 // per rank, if there is room for as much from each
)

// ReportLimit returns the maximum size in bytes of a rank's metrics, as JSON. The
// metrics of all ranks share one event; of a large group, it has those of few ranks and
// a summary.
func ReportLimit(world int) int {
	if world > exactRanks {
		const summary = 4 // times the text of the names, for their numbers
		return (maxEvent-eventSpare-summary*summarizedText)/(1+mostOutliers) - rankSpare
	}
	return min(maxReport, (maxEvent-eventSpare)/world-rankSpare)
}

// CheckMetrics returns an error if an event cannot hold the metrics of one rank
// of a world.
func CheckMetrics(metrics map[string]any, world int) error {
	for k, v := range metrics {
		switch v.(type) {
		case float64, string, bool, nil:
		default:
			return fmt.Errorf("metric %q is a %T: metrics are numbers, strings or booleans", k, v)
		}
	}
	body, err := json.Marshal(metrics)
	if err != nil {
		return fmt.Errorf("metrics: %w", err)
	}
	if limit := ReportLimit(world); len(body) > limit {
		return fmt.Errorf("the metrics have %d bytes; each of %d ranks may report %d at a time: report fewer, or put large values into a file", len(body), world, limit)
	}
	return nil
}

// QuoteNonFinite quotes the names of non-finite numbers, which Python's json module
// writes bare. Everything else stays unchanged.
func QuoteNonFinite(body []byte) []byte {
	var out []byte
	quoted := false
	for i := 0; i < len(body); i++ {
		if !quoted {
			if name := nonFinite(body[i:]); name != "" {
				out = append(append(append(out, '"'), name...), '"')
				i += len(name) - 1
				continue
			}
		}
		switch {
		case body[i] == '"':
			quoted = !quoted
		case quoted && body[i] == '\\' && i+1 < len(body):
			out = append(out, body[i])
			i++
		}
		out = append(out, body[i])
	}
	return out
}

func nonFinite(at []byte) string {
	for _, name := range []string{"NaN", "Infinity", "-Infinity"} {
		if bytes.HasPrefix(at, []byte(name)) {
			return name
		}
	}
	return ""
}

// Metrics with a meaning of their own, as in Ray's function API.
const (
	metricDuplicate    = "__duplicate__"     // true: the rank has returned without a last report; not an iteration
	metricTimeThisIter = "time_this_iter_s"  // seconds of the rank's own work, in place of the trainer's measurement
	metricBusyThisIter = client.BusyThisIter // seconds of the iteration in which the rank waited for no other rank
)

// alreadyDone refuses requests after a rank's last report.
func alreadyDone(rank int, at int64) error {
	return problem.Errorf(problem.Conflict, "already done: rank %d finished with step %d; it cannot report again", rank, at)
}

// isMarker reports whether a report only records that a rank has returned.
func isMarker(r client.Report) bool { return r.Metrics[metricDuplicate] == true }

// ownTime removes one of the rank's own measurements of time from its metrics and returns
// it, or nil if there is none. Left in, it would make every rank's report differ.
func ownTime(metrics map[string]any, name string) (*float64, error) {
	said, has := metrics[name]
	if !has {
		return nil, nil
	}
	seconds, ok := said.(float64)
	if !ok || seconds < 0 || math.IsInf(seconds, 0) {
		return nil, problem.Errorf(problem.Invalid, "metric %q is %v: want seconds, a number from 0 on, or leave it out", name, said)
	}
	delete(metrics, name)
	return &seconds, nil
}
