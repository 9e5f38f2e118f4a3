package launch

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"syscall"
)

// TorchConfig is what torchrun's flags say of the workers' environment.
type TorchConfig struct {
	Role       string // ROLE_NAME; default "default"
	RunID      string // TORCHELASTIC_RUN_ID; default: the run's name
	MasterAddr string // default 127.0.0.1
	MasterPort int    // default: a free one, another for each attempt
}

func (c TorchConfig) masterAddr() string { return cmp.Or(c.MasterAddr, "127.0.0.1") }

// masterPort holds the port for rank 0.
func (c TorchConfig) masterPort() (*heldPort, error) {
	h, err := holdPort(c.MasterPort)
	if errors.Is(err, syscall.EADDRINUSE) || errors.Is(err, syscall.EACCES) {
		return nil, fmt.Errorf("%w: %w: choose another --master-port, or leave it out for a free one", ErrConfig, err)
	}
	return h, err
}

// ncclErrorHandling is the user's choice, or torchrun's.
func ncclErrorHandling() string {
	if v, set := os.LookupEnv("TORCH_NCCL_ASYNC_ERROR_HANDLING"); set {
		return v
	}
	return "1"
}
