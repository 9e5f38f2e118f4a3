package session

import (
	"bytes"
	"encoding/json"
	"fmt"
)

// Bounds of the metrics of an iteration, in bytes.
const (
	maxEvent   = 1 << 20  // limit of the log
	eventSpare = 16 << 10 // reserved for everything other than metrics
	rankSpare  = 64       // reserved in each rank's part
	maxReport  = 64 << 10 // per rank, if there is room for as much from each
)

// ReportLimit returns the maximum size in bytes of a rank's metrics, as JSON. The
// metrics of all ranks share one event.
func ReportLimit(world int) int { return min(maxReport, (maxEvent-eventSpare)/world-rankSpare) }

// checkMetrics returns an error if an event cannot hold the metrics of one rank
// of a world.
func checkMetrics(metrics map[string]any, world int) error {
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

// bareNumbers quotes the names of non-finite numbers, which Python's json module
// writes bare. Everything else stays unchanged.
func bareNumbers(body []byte) []byte {
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
