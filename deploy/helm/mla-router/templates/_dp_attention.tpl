{{/* Command and arguments of a pod with DP ranks: they have a router of their own, which serves at the worker's port. */}}
{{- define "mla.dpAttention" }}
{{- $worker := .Values.worker }}
{{- if mod $worker.tpSize $worker.dpAttention }}
{{- fail (printf "worker.dpAttention %v must divide worker.tpSize %v" $worker.dpAttention $worker.tpSize) }}
{{- end }}
{{- if gt (int $worker.nodes) 1 }}
{{- fail "worker.dpAttention above 1: DP ranks are on one machine; set worker.nodes to 1" }}
{{- end }}
command: [python, -m, mla_router.launch_server]
args:
  - --host=0.0.0.0
  - --port=31000
  - --router-dp-worker-base-port=31001
  - --enable-dp-attention
  - --dp-size={{ $worker.dpAttention }}
{{- end }}
