package cmd_test

import (
	"path/filepath"
	"testing"
)

// TestBenchStoreJSON records what the benchmarks of log and views print with
// --json, and that they leave nothing behind.
func TestBenchStoreJSON(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	t.Run("each", func(t *testing.T) {
		for _, b := range []struct {
			name string
			args []string
			want []string // members above zero
		}{
			{"log", []string{"--events", "300", "--writers", "4", "--outstanding", "2"}, []string{"events_per_second", "p50_ms", "p99_ms", "fsync_p50_ms"}},
			{"replay", []string{"--events", "1500"}, []string{"rebuild_events_per_second", "read_events_per_second"}},
			{"lookup", []string{"--checkpoints", "20", "--tensors", "10"}, []string{"p50_ms", "p99_ms", "list_ms", "best_ms"}},
			{"save", []string{"--ranks", "2", "--size", "33MB", "--tensors", "8", "--unchanged", "0.75"}, []string{"bytes", "bytes_written", "seconds", "bytes_per_second", "raw_bytes_per_second", "ratio", "blocking_seconds_per_gb", "copy_seconds_per_gb"}},
			{"load", []string{"--ranks", "2", "--to-ranks", "3", "--size", "20MB", "--tensors", "5"}, []string{"bytes", "bytes_read", "over_read", "seconds", "bytes_per_second", "raw_bytes_per_second", "ratio"}},
			{"age", []string{"--checkpoints", "20", "--events", "1000", "--runs", "4", "--rounds", "1"}, []string{
				"checkpoints", "events", "runs", "generation_seconds", "first_open_seconds",
				"takeover_seconds", "open_after_kill_seconds", "open_seconds", "ls_seconds", "ls_beside_owner_seconds", "show_seconds", "jobs_seconds", "gc_seconds", "gc_beside_owner_seconds", "gc_rss_bytes",
				"owner_rss_bytes", "owner_peak_rss_bytes", "verify_log_seconds", "verify_log_rss_bytes", "log_bytes", "data_bytes", "views_bytes",
			}},
			{"jobs", []string{"--jobs", "2", "--seconds", "1"}, []string{"seconds"}},
			{"nodes", []string{"--ranks", "40", "--nodes", "5", "--saves", "1"}, []string{
				"join_seconds", "first_commit_seconds", "commit_seconds", "views_seconds", "log_bytes", "events", "coordinator_cpu_seconds", "coordinator_peak_rss_bytes",
			}},
		} {
			t.Run(b.name, func(t *testing.T) {
				t.Parallel() // some wait most of their time
				args := append([]string{"bench", b.name, "--dir", dir, "--json"}, b.args...)
				text := output(t, 0, "ckptstore", args...)
				schema(t, "bench-"+b.name, text)
				var got map[string]any
				decode(t, text, &got)
				for _, member := range b.want {
					if v, ok := got[member].(float64); !ok || v <= 0 {
						t.Errorf("bench %s: %s is %v", b.name, member, got[member])
					}
				}
			})
		}
	})
	output(t, 2, "ckptstore", "bench", "save", "--unchanged", "2")
	left, err := filepath.Glob(filepath.Join(dir, ".*"))
	if err != nil || len(left) != 0 {
		t.Errorf("left behind: %v (%v)", left, err)
	}
	both := output(t, 0, "ckptstore", "bench", "log", "--through", "both", "--dir", dir, "--json", "--events", "300", "--writers", "4", "--outstanding", "2")
	schema(t, "bench-log-through", both)
	var compared map[string]any
	decode(t, both, &compared)
	for _, member := range []string{"ratio", "front_events_per_second", "front_p50_ms", "front_p99_ms"} {
		if v, ok := compared[member].(float64); !ok || v <= 0 {
			t.Errorf("bench log --through both: %s is %v", member, compared[member])
		}
	}
	audited := output(t, 0, "ckptstore", "bench", "log", "--audit", "--dir", dir, "--json", "--events", "600", "--writers", "4", "--outstanding", "2")
	schema(t, "bench-log-audit", audited)
	var evidence struct {
		Audit map[string]float64 `json:"audit"`
	}
	decode(t, audited, &evidence)
	for _, member := range []string{"ratio", "events_per_second", "p50_ms", "p99_ms", "fold_ms", "head_ms"} {
		if evidence.Audit[member] <= 0 {
			t.Errorf("bench log --audit: %s is %v", member, evidence.Audit[member])
		}
	}
	output(t, 2, "ckptstore", "bench", "log", "--audit", "--through", "both")
	output(t, 2, "ckptstore", "bench", "log", "--through", "none")
	output(t, 2, "ckptstore", "bench", "log", "--writers", "0")
	output(t, 2, "ckptstore", "bench", "load", "--to-ranks", "0")
	output(t, 2, "ckptstore", "bench", "load", "--size", "1000", "--tensors", "64")
	output(t, 2, "ckptstore", "bench", "nodes", "--ranks", "3", "--nodes", "4")
	output(t, 2, "ckptstore", "bench", "age", "--keep")
	output(t, 2, "ckptstore", "bench", "age", "--events", "10")
}

// TestViewsJSON records what the commands on views print with --json.
func TestViewsJSON(t *testing.T) {
	t.Parallel()
	at := "--store=" + filepath.Join(t.TempDir(), "store")
	output(t, 0, "ckptstore", "init", at)
	text := output(t, 0, "ckptstore", "views", "verify", "--json", at)
	schema(t, "views-verify", text)
	schema(t, "views-status", output(t, 0, "ckptstore", "views", "status", "--json", at))
	schema(t, "views-verify", output(t, 0, "ckptstore", "views", "rebuild", "--json", at))
}
