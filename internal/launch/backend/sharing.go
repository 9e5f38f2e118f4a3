package backend

import (
	"fmt"
	"strconv"
)

// EnvShareDevices decides whether workers see each other's devices, whatever
// the flag and the backend say.
const EnvShareDevices = "CKPTSTORE_SHARE_DEVICES"

// Sharing is what was asked about the sharing of visible devices: value is that
// of [EnvShareDevices], set unless it is empty, and flag what else was said, if
// anything. The answer nil leaves it to the backend.
func Sharing(flag *bool, value string) (*bool, error) {
	if value == "" {
		return flag, nil
	}
	share, err := strconv.ParseBool(value)
	if err != nil {
		return nil, fmt.Errorf("%s is %q: set it to 1 or to 0, or unset it", EnvShareDevices, value)
	}
	return &share, nil
}
