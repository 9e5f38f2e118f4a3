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
