{{/* Command and arguments of a pod with DP ranks: they have a router of their own, which serves at the worker's port. With
     several nodes that router is in the pod of node 0, and sends requests to the DP ranks of all nodes. */}}
{{- define "mla.dpAttention" }}
{{- $worker := .Values.worker }}
{{- if mod $worker.tpSize $worker.dpAttention }}
{{- fail (printf "worker.dpAttention %v must divide worker.tpSize %v" $worker.dpAttention $worker.tpSize) }}
{{- end }}
{{- if mod $worker.dpAttention $worker.nodes }}
{{- fail (printf "worker.nodes %v must divide worker.dpAttention %v: a DP rank is on one node" $worker.nodes $worker.dpAttention) }}
{{- end }}
command: [python, -m, mla_router.launch_server]
args:
  - --host=0.0.0.0
  - --port=31000
  - --router-dp-worker-base-port=31001
  - --enable-dp-attention
  - --dp-size={{ $worker.dpAttention }}
{{- end }}
