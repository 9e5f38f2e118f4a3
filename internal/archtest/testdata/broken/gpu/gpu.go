// Package gpu may import NVML and nothing of ours.
package gpu

import (
	_ "github.com/NVIDIA/go-nvml/pkg/nvml"

	_ "github.com/ckptstore/ckptstore/tensor"
)
