package trainer

import (
	"errors"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/session/staging"
)

func TestStagingFlags(t *testing.T) {
	for _, c := range []struct {
		slots        int
		memory, busy string
		want         staging.Memory
		says         string
	}{
		{2, "", "wait", staging.Memory{}, ""},
		{1, "40%", "skip", staging.Memory{Percent: 40}, ""},
		{16, "1.5GiB", "fail", staging.Memory{Bytes: 3 << 29}, ""},
		{2, "2GB", "wait", staging.Memory{Bytes: 2e9}, ""},
		{2, "4096", "wait", staging.Memory{Bytes: 4096}, ""},
		{0, "", "wait", staging.Memory{}, "--staging-slots 0"},
		{17, "", "wait", staging.Memory{}, "--staging-slots 17"},
		{2, "", "later", staging.Memory{}, "--when-busy later: give wait, skip or fail"},
		{2, "0%", "wait", staging.Memory{}, `--staging-memory: "0%" is neither`},
		{2, "101%", "wait", staging.Memory{}, `"101%" is neither`},
		{2, "much", "wait", staging.Memory{}, `"much" is neither`},
		{2, "-1G", "wait", staging.Memory{}, `"-1G" is neither`},
		{2, "1e400", "wait", staging.Memory{}, `"1e400" is neither`},
	} {
		got, err := runOptions{stagingSlots: c.slots, stagingMemory: c.memory, whenBusy: c.busy}.staging()
		if c.says == "" && (err != nil || got != c.want) {
			t.Errorf("%+v gives %+v, %v", c, got, err)
		}
		if c.says != "" && (!errors.Is(err, launch.ErrConfig) || !strings.Contains(err.Error(), c.says)) {
			t.Errorf("%+v gives %v", c, err)
		}
	}
}

func TestReplicationFlags(t *testing.T) {
	for _, c := range []struct {
		replicas     int
		rate, domain string
		nodes        int
		want         int64 // rate
		says         string
	}{
		{0, "256MiB", "", 1, 256 << 20, ""},
		{1, "256MiB", "rack 7", 2, 256 << 20, ""},
		{1, "0", "", 2, 0, ""},
		{1, "256MiB", "", 1, 0, "--replicas 1: a job on one node has no other node for the copies"},
		{2, "256MiB", "", 3, 256 << 20, ""},
		{2, "256MiB", "", 2, 0, "--replicas 2: the job has at most 2 nodes"},
		{4, "256MiB", "", 5, 0, "--replicas 4: give 0 to 3"},
		{-1, "256MiB", "", 4, 0, "--replicas -1: give 0 to 3"},
		{1, "40%", "", 2, 0, `--replica-rate "40%": give a size`},
		{1, "fast", "", 2, 0, `--replica-rate "fast": give a size`},
		{1, "0", strings.Repeat("x", maxDomain+1), 2, 0, "--domain has 257 bytes"},
	} {
		var cfg launch.Config
		o := nodesOptions{replicas: c.replicas, replicaRate: c.rate, domain: c.domain}
		err := o.replication(&cfg, placement{max: c.nodes})
		if c.says == "" && (err != nil || cfg.Replicas != c.replicas || cfg.ReplicaRate != c.want) {
			t.Errorf("%+v gives %d replicas and the rate %d: %v", c, cfg.Replicas, cfg.ReplicaRate, err)
		}
		if c.says != "" && (!errors.Is(err, launch.ErrConfig) || !strings.Contains(err.Error(), c.says)) {
			t.Errorf("%+v gives %v", c, err)
		}
	}
}
