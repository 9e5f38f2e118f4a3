//go:build cgo && linux

package gpu

import (
	"slices"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// TestReadiness checks a machine of eight devices, with NVML's own mock.
func TestReadiness(t *testing.T) {
	server, device := measured(t)
	checks, ids := readiness(look(t, server), nil, nil)
	wantChecks(t, checks, [2]string{"passed", "driver 550.54.15, CUDA up to 12.4, 0: Mock"}, [2]string{"passed", "no device reports a problem"}, [2]string{"passed", "8 workers"})
	if len(ids) != 8 || ids[5] != device(5).UUID || checks[0].Figures["devices"] != 8 {
		t.Errorf("devices %q, figures %v", ids, checks[0].Figures)
	}

	visible := "6,2"
	checks, ids = readiness(look(t, server), nil, &visible)
	wantChecks(t, checks, [2]string{"passed", ""}, [2]string{"passed", ""}, [2]string{"passed", "2 workers"})
	if !slices.Equal(ids, []string{device(6).UUID, device(2).UUID}) {
		t.Errorf("devices %q", ids)
	}
	for _, visible := range []string{"9", ""} {
		checks, _ = readiness(look(t, server), nil, &visible)
		wantChecks(t, checks, [2]string{"passed", ""}, [2]string{"passed", ""}, [2]string{"failed", "CUDA_VISIBLE_DEVICES"})
	}

	device(3).GetTotalEccErrorsFunc = func(nvml.MemoryErrorType, nvml.EccCounterType) (uint64, nvml.Return) { return 2, nvml.SUCCESS }
	device(4).GetTemperatureFunc = func(nvml.TemperatureSensors) (uint32, nvml.Return) { return 95, nvml.SUCCESS }
	checks, _ = readiness(look(t, server), nil, nil)
	wantChecks(t, checks, [2]string{"passed", ""}, [2]string{"failed", "2 memory errors that ECC could not correct"}, [2]string{"passed", "8 workers"})
	if !strings.Contains(checks[1].Text, "95 °C") {
		t.Errorf("the warning is not told: %s", checks[1].Text)
	}

	device(7).GetUUIDFunc = func() (string, nvml.Return) { return "", nvml.ERROR_GPU_IS_LOST }
	checks, ids = readiness(look(t, server), nil, nil)
	wantChecks(t, checks, [2]string{"failed", "does not answer"}, [2]string{"failed", "does not answer"}, [2]string{"passed", "7 workers"})
	if slices.Contains(ids, device(7).UUID) {
		t.Errorf("a lost device is given away: %q", ids)
	}
}
