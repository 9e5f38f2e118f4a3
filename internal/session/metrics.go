package session

import (
	"bytes"
	"encoding/json"
	"fmt"
)

// Bounds of the metrics of an iteration, in bytes.
const (
	maxEvent   = 1 << 20  // what the log takes
	eventSpare = 16 << 10 // of it, for all else than metrics
	rankSpare  = 64       // of a rank's part, for all else than its metrics
	maxReport  = 64 << 10 // of one rank, if there is room for as much from each
)

// ReportLimit returns how many bytes the metrics of a rank may have, as JSON: those
// of all ranks are one event.
func ReportLimit(world int) int { return min(maxReport, (maxEvent-eventSpare)/world-rankSpare) }

// checkMetrics reports what an event cannot hold, from one rank of a world.
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

// bareNumbers puts the names of non-finite numbers, which Python's json module
// writes bare, in quotes. Anything else is left as it came.
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
