package main

import (
	"errors"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/worker"
)

func TestStagingFlags(t *testing.T) {
	for _, c := range []struct {
		slots        int
		memory, busy string
		want         worker.StagingMemory
		says         string
	}{
		{2, "", "wait", worker.StagingMemory{}, ""},
		{1, "40%", "skip", worker.StagingMemory{Percent: 40}, ""},
		{16, "1.5GiB", "fail", worker.StagingMemory{Bytes: 3 << 29}, ""},
		{2, "2GB", "wait", worker.StagingMemory{Bytes: 2e9}, ""},
		{2, "4096", "wait", worker.StagingMemory{Bytes: 4096}, ""},
		{0, "", "wait", worker.StagingMemory{}, "--staging-slots 0"},
		{17, "", "wait", worker.StagingMemory{}, "--staging-slots 17"},
		{2, "", "later", worker.StagingMemory{}, "--when-busy later: give wait, skip or fail"},
		{2, "0%", "wait", worker.StagingMemory{}, `--staging-memory: "0%" is neither`},
		{2, "101%", "wait", worker.StagingMemory{}, `"101%" is neither`},
		{2, "much", "wait", worker.StagingMemory{}, `"much" is neither`},
		{2, "-1G", "wait", worker.StagingMemory{}, `"-1G" is neither`},
		{2, "1e400", "wait", worker.StagingMemory{}, `"1e400" is neither`},
	} {
		got, err := runOptions{stagingSlots: c.slots, stagingMemory: c.memory, whenBusy: c.busy}.staging()
		if c.says == "" && (err != nil || got != c.want) {
			t.Errorf("%+v gives %+v, %v", c, got, err)
		}
		if c.says != "" && (!errors.Is(err, worker.ErrConfig) || !strings.Contains(err.Error(), c.says)) {
			t.Errorf("%+v gives %v", c, err)
		}
	}
}
